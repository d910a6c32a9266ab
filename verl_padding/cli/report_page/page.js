"use strict";

const COLOURS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f"];
const WAITING = "#e6e6e6", MAX_RANKS = 64;
const LAYOUT = { margin: { l: 50, r: 10, t: 28, b: 30 }, font: { size: 11 }, showlegend: false };
const CONFIG = { displayModeBar: false, responsive: true };
const byId = (id) => document.getElementById(id);
const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);
const promptOf = (key) => key.split("_").slice(0, -2).join("_");
const sessionOf = (key) => key.split("_").slice(0, -1).join("_");

function shown(number) {
  if (number === null) return "unknown";
  return Number.isInteger(number) ? number.toLocaleString("en") : number.toPrecision(3);
}

/** An element; texts are never taken for HTML. */
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Plotly takes some HTML in its labels. */
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

async function unpack(name) {
  const bytes = Uint8Array.from(atob(byId(`packed-${name}`).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Curves: a line for each run

async function showCurves() {
  const { curves, first } = await unpack("curves");
  const names = Object.keys(curves);
  byId("curves").hidden = !names.length;
  byId("metric").append(new Option("...", ""), ...names.map((name) => new Option(name, name)));
  const draw = (name) => {
    const traces = Object.entries(curves[name]).map(([run, points], number) => ({
      x: points.map(([step]) => step),
      y: points.map(([, value]) => value),
      name: escaped(run),
      mode: points.length > 1 ? "lines" : "markers",
      line: { color: COLOURS[number % COLOURS.length] },
    }));
    const title = { text: escaped(name), font: { size: 12 } };
    const legend = { orientation: "h", y: -0.15 };
    Plotly.newPlot(byId("charts").appendChild(element("div")), traces,
      { ...LAYOUT, title, legend, showlegend: traces.length > 1, yaxis: { rangemode: "tozero" } }, CONFIG);
  };
  first.forEach(draw);
  byId("metric").addEventListener("change", (event) => event.target.value && draw(event.target.value));
}

// A step

let step = null;

async function showStep(name) {
  step = await unpack(name);
  for (const line of document.querySelectorAll("#summaries tbody tr")) {
    line.classList.toggle("chosen", line.dataset.step === name);
  }
  byId("title").textContent = step.name;
  const calls = Object.keys(step.charts);
  const chosen = [byId("call").value, "actor", calls[0]].find((call) => calls.includes(call));
  byId("call").replaceChildren(...calls.map((call) => new Option(call, call, false, call === chosen)));
  byId("step").hidden = false;
  showBars();
  showPrompts();
}

const placeOf = ([rank, mini, micro]) =>
  `mini-batch ${mini}, rank ${rank}` + (micro === null ? "" : `, micro-batch ${micro}`);

function showBars() {
  byId("held").replaceChildren();
  const all = step.charts[byId("call").value];
  const ranks = 1 + Math.max(...all.map(([rank]) => rank));
  const bars = all.filter(([rank]) => rank < MAX_RANKS);
  byId("about-bars").textContent = "Blue: the rank computes. Grey: it waits for the rank with the most tokens. " +
    "Click a bar to see its rows." +
    (ranks > MAX_RANKS ? ` The first ${MAX_RANKS} of ${ranks} ranks are shown.` : "");
  const trace = (base, x, color) => ({
    type: "bar", orientation: "h", base, x, y: bars.map(([rank]) => rank), customdata: bars.map((_, place) => place),
    text: bars.map((bar) => `${placeOf(bar)}<br>${count(bar[6].length, "row")}, ${count(bar[4], "token")}`),
    hovertemplate: "%{text}<extra></extra>", textposition: "none",
    marker: { color, line: { color: "white", width: 0.6 } },
  });
  const colours = bars.map(([, mini]) => (mini % 2 ? "#6baed6" : COLOURS[0]));
  Plotly.react(byId("bars"), [
    trace(bars.map((bar) => bar[3]), bars.map((bar) => bar[4]), colours),
    trace(bars.map((bar) => bar[3] + bar[4]), bars.map((bar) => bar[5] - bar[4]), WAITING),
  ], {
    ...LAYOUT, barmode: "overlay", bargap: 0.15, height: 90 + 18 * Math.max(Math.min(ranks, MAX_RANKS), 4),
    yaxis: { title: { text: "rank" }, autorange: "reversed", dtick: ranks > 16 ? 8 : 1 },
    xaxis: { title: { text: "tokens of rows" } }, margin: { l: 50, r: 10, t: 10, b: 40 },
  }, CONFIG);
  byId("bars").removeAllListeners?.("plotly_click");
  byId("bars").on("plotly_click", (event) => showHeld(bars[event.points[0].customdata]));
}

function showHeld(bar) {
  const buttons = bar[6].map((row) => {
    const button = element("button", "", step.keys[row]);
    button.addEventListener("click", () => openRow(row));
    return button;
  });
  byId("held").replaceChildren(element("p", "", `Rows of ${placeOf(bar)}:`), ...buttons);
}

// Prompts and their rows

const HEADINGS = { tokens: "tokens", shared_tokens: "shared", trained_tokens: "trained", reward: "reward",
  advantage: "advantage", weight: "weight", staleness: "staleness" };
const of = (column, rows) => rows.map((row) => step.columns[column][row]);

/** Rows of each prompt, in the order of the batch. */
function rowsOfPrompts() {
  const found = new Map();
  step.keys.forEach((key, row) => {
    const prompt = promptOf(key);
    if (!found.has(prompt)) found.set(prompt, []);
    found.get(prompt).push(row);
  });
  return found;
}

function showPrompts() {
  const prompts = [...rowsOfPrompts()].map(([prompt, rows]) => {
    // Every row of a session has its reward.
    const rewards = [...new Map(rows.map((row) => [sessionOf(step.keys[row]), of("reward", [row])[0]])).values()];
    const reward = rewards.includes(null) ? null : sum(rewards) / rewards.length;
    return { prompt, rows, reward, sessions: rewards.length, tokens: sum(of("tokens", rows)), zeros: sum(of("zero_advantage", rows)) };
  });
  const by = { tokens: (each) => -each.tokens, low: (each) => each.reward ?? Infinity, zeros: (each) => -each.zeros };
  const key = by[byId("sort").value];
  if (key) prompts.sort((a, b) => key(a) - key(b) || 0); // of two that are unknown, the difference is no number
  byId("prompts").replaceChildren(...prompts.map(({ prompt, rows, reward, sessions, tokens, zeros }) => {
    const details = element("details"), summary = details.appendChild(element("summary"));
    details.dataset.prompt = prompt;
    const shared = Math.round((100 * sum(of("shared_tokens", rows))) / tokens);
    const figures = [count(sessions, "session"), count(rows.length, "row"), count(tokens, "token"), `${shared} % shared`];
    figures.push(`reward ${shown(reward)}`, count(zeros, "zero-advantage row"));
    summary.append(element("code", "", prompt), element("span", "figures", figures.join(", ")));
    details.addEventListener("toggle", () => fill(details, rows));
    return details;
  }));
}

/** Makes the table of a prompt when it is first opened. */
function fill(details, rows) {
  if (!details.open || details.children.length > 1) return;
  const table = details.appendChild(element("table")), columns = Object.keys(HEADINGS);
  const head = table.createTHead().insertRow(), body = table.createTBody();
  for (const name of ["row", "", ...columns.map((column) => HEADINGS[column])]) head.append(element("th", "", name));
  const longest = Math.max(...of("tokens", rows));
  const held = new Set(rows);
  for (const row of step.order.filter((each) => held.has(each))) {
    const line = body.insertRow(), open = () => toggleTexts(line, row);
    line.className = of("zero_advantage", [row])[0] ? "row zero" : "row";
    line.dataset.row = row;
    line.tabIndex = 0;
    line.append(element("td", "name", step.keys[row].split("_").slice(-2).join("_")));
    line.appendChild(element("td", "bar")).append(barOf(row, longest));
    for (const column of columns) {
      const number = step.columns[column][row];
      const sign = column === "advantage" ? { 1: "good", [-1]: "bad" }[Math.sign(number)] : "";
      // A row without a trained token has no advantage, and not every agent loop says how stale a row is.
      const none = number === null && (column === "staleness" || (column === "advantage" && !step.columns.trained_tokens[row]));
      line.append(element("td", sign ?? "", none ? "-" : shown(number)));
    }
    line.addEventListener("click", open);
    line.addEventListener("keydown", (event) => event.key === "Enter" && open());
  }
}

function barOf(row, longest) {
  const bar = element("div", "line");
  const [tokens, shared, trained] = ["tokens", "shared_tokens", "trained_tokens"].map((name) => of(name, [row])[0] ?? 0);
  for (const [name, from, length] of [["shared", 0, shared], ["own", shared, tokens - shared], ["trained", tokens - trained, trained]]) {
    if (!length) continue;
    const part = bar.appendChild(element("span", name));
    part.style.left = `${(100 * from) / longest}%`;
    part.style.width = `${(100 * length) / longest}%`;
  }
  return bar;
}

function openRow(row) {
  const prompt = promptOf(step.keys[row]);
  const details = [...byId("prompts").children].find((each) => each.dataset.prompt === prompt);
  details.open = true;
  fill(details, rowsOfPrompts().get(prompt));
  const line = details.querySelector(`tr[data-row="${row}"]`);
  if (!line.nextSibling?.classList.contains("opened")) toggleTexts(line, row);
  line.scrollIntoView({ block: "center" });
}

function toggleTexts(line, row) {
  if (line.nextSibling?.classList.contains("opened")) return line.nextSibling.remove();
  const opened = element("tr", "opened"), cell = opened.appendChild(element("td", "texts"));
  cell.colSpan = line.children.length;
  line.after(opened);
  const places = Object.entries(step.charts).flatMap(([call, bars]) => bars.filter((bar) => bar[6].includes(row))
    .map((bar) => `${call}: ${placeOf(bar)}`));
  cell.append(element("p", "", [step.keys[row], ...places].join("; ")));
  const other = step.shares_with[row] ?? null, texts = step.texts[row];
  if (other !== null) {
    const shared = count(step.columns.shared_tokens[row], "token");
    cell.append(element("p", "", `Its first ${shared} are shared with ${step.keys[other]}.`));
  }
  if (texts && "branch_at" in texts) {
    const sides = element("div", "sides");
    for (const [key, text] of [[step.keys[row], texts.mine], [step.keys[other], texts.other]]) {
      const side = sides.appendChild(element("div"));
      side.append(element("div", "", key), pre(text));
    }
    cell.append(element("p", "", `Their texts agree for ${count(texts.branch_at, "character")}:`), pre(texts.before), sides);
  }
  if (texts) for (const name of ["input", "output"]) cell.append(element("div", "", name), pre(texts[name]));
  else cell.append(element("p", "", "No rollout dump has the row's texts."));
}

function pre(text) {
  const made = element("pre");
  if (typeof text === "string") made.textContent = text;
  else made.append(text[0], element("span", "cut", `... ${count(text[1], "character")} ...`), text[2]);
  return made;
}

for (const line of document.querySelectorAll("#summaries tbody tr")) {
  const choose = () => showStep(line.dataset.step);
  line.addEventListener("click", choose);
  line.addEventListener("keydown", (event) => event.key === "Enter" && choose());
}
byId("call").addEventListener("change", showBars);
byId("sort").addEventListener("change", showPrompts);
showCurves();
// The address may name a step by its line in the table, and a row of it, as #step-3/17; else the last step is shown.
const [, named, row] = location.hash.match(/^#(step-\d+)(?:\/(\d+))?$/) ?? [];
const chosen = byId(`packed-${named}`) ? named : document.querySelector("#summaries tbody tr:last-of-type")?.dataset.step;
if (chosen) showStep(chosen).then(() => chosen === named && step.columns.tokens[row] && openRow(Number(row)));
