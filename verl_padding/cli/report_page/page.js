"use strict";

const OURS = "#1f77b4", PADS = "#333333", WAITING = "#e6e6e6";
const LAYOUT = { margin: { l: 50, r: 10, t: 28, b: 30 }, font: { size: 11 }, showlegend: false };
const CONFIG = { displayModeBar: false, responsive: true };
const byId = (id) => document.getElementById(id);
const count = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
const shown = (number) => (number === null ? "-" : Number.isInteger(number) ? number.toLocaleString("en") : number.toPrecision(3));
const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);
/** Null where one of the numbers is not known. */
const mean = (numbers) => (numbers.length && !numbers.includes(null) ? sum(numbers) / numbers.length : null);
const known = (number) => (number === null ? "unknown" : shown(number));
const promptOf = (key) => key.split("_").slice(0, -2).join("_");
const sessionOf = (key) => key.split("_").slice(0, -1).join("_");

/** An element; texts are never taken for HTML. */
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function unpack(name) {
  const bytes = Uint8Array.from(atob(byId(`packed-${name}`).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Curves

async function showCurves() {
  const { curves, first } = await unpack("curves");
  const names = Object.keys(curves);
  byId("curves").hidden = !names.length;
  byId("metric").append(new Option("...", ""), ...names.sort().map((name) => new Option(name, name)));
  const draw = (name) => {
    const chart = byId("charts").appendChild(element("div"));
    const [x, y] = [0, 1].map((place) => curves[name].map((point) => point[place]));
    const title = { text: escaped(name), font: { size: 12 } };
    Plotly.newPlot(chart, [{ x, y, mode: x.length > 1 ? "lines" : "markers", line: { color: OURS } }],
      { ...LAYOUT, title, yaxis: { rangemode: "tozero" } }, CONFIG);
  };
  first.forEach(draw);
  byId("metric").addEventListener("change", (event) => event.target.value && draw(event.target.value));
}

/** Plotly takes some HTML in its labels. */
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

// A step

let step = null;

async function showStep(name) {
  step = await unpack(name);
  for (const line of document.querySelectorAll("#summaries tbody tr")) {
    line.classList.toggle("chosen", line.dataset.name === name);
  }
  byId("title").textContent = `Step ${step.step}` + (step.update ? `, update ${step.update}` : "");
  const calls = [...new Set([...step.laps.map((lap) => lap[0]), ...Object.keys(step.places)])];
  const chosen = calls.includes(byId("call").value) ? byId("call").value : calls.includes("actor") ? "actor" : calls[0];
  byId("call").replaceChildren(...calls.map((call) => new Option(call, call, false, call === chosen)));
  byId("step").hidden = false;
  showBars();
  showPrompts();
}

/** Micro-batches of a call: by the clock where it has laps, else by their rows' tokens, ranks waiting for the longest. */
function microBatches(call) {
  const laps = step.laps.filter((lap) => lap[0] === call);
  if (laps.length) {
    const first = Math.min(...laps.map((lap) => lap[4]));
    return laps.map(([, rank, mini, micro, start, seconds, busy, rows, pads, tokens]) =>
      ({ rank, mini, micro, start: start - first, work: busy, all: seconds, rows, pads, tokens }));
  }
  const found = new Map();
  step.places[call].forEach((place, row) => {
    if (!place || place[1] >= 64) return;
    const [mini, rank, micro] = place, name = place.join();
    if (!found.has(name)) found.set(name, { rank, mini, micro, rows: [], pads: null, tokens: 0 });
    found.get(name).rows.push(row);
    found.get(name).tokens += step.rows.tokens[row];
  });
  const levels = new Map();
  for (const each of found.values()) {
    const level = each.mini * 1e6 + (each.micro ?? 0);
    levels.set(level, Math.max(levels.get(level) ?? 0, each.tokens));
  }
  let begin = 0;
  const begins = new Map([...levels].sort(([a], [b]) => a - b).map(([level, longest]) => [level, (begin += longest) - longest]));
  return [...found.values()].map((each) => {
    const level = each.mini * 1e6 + (each.micro ?? 0);
    return { ...each, start: begins.get(level), work: each.tokens, all: levels.get(level) };
  });
}

function showBars() {
  const call = byId("call").value, bars = microBatches(call);
  const timed = step.laps.some((lap) => lap[0] === call);
  byId("held").replaceChildren();
  byId("about-bars").textContent =
    (timed ? "Seconds of each rank, by the clock: blue it computed, grey it waited."
      : "Tokens of each rank's rows, each counted whole: blue are its own, grey is what it waits for the slowest rank.") +
    " Choose a bar for its rows." + (step.ranks > 64 ? ` The first 64 of ${step.ranks} ranks are shown.` : "");
  const text = bars.map((bar) =>
    `mini-batch ${bar.mini}` + (bar.micro === null ? "" : `, micro-batch ${bar.micro}`) + `<br>${count(bar.rows.length, "row")}` +
    (bar.pads === null ? "" : `, ${count(bar.pads, "pad")}`) + `, ${count(bar.tokens, "token")}`);
  const trace = (base, x, color) => ({
    type: "bar", orientation: "h", y: bars.map((bar) => bar.rank), base, x, text, customdata: bars.map((_, place) => place),
    hovertemplate: "rank %{y}, %{text}<extra></extra>", textposition: "none",
    marker: { color, line: { color: "white", width: 0.6 } },
  });
  const colours = bars.map((bar) => (bar.rows.length ? (bar.mini % 2 ? "#6baed6" : OURS) : PADS));
  const ranks = 1 + Math.max(0, ...bars.map((bar) => bar.rank));
  Plotly.react(byId("bars"), [
    trace(bars.map((bar) => bar.start), bars.map((bar) => bar.work), colours),
    trace(bars.map((bar) => bar.start + bar.work), bars.map((bar) => bar.all - bar.work), WAITING),
  ], {
    ...LAYOUT, barmode: "overlay", bargap: 0.15, height: 90 + 18 * Math.max(ranks, 4),
    yaxis: { title: { text: "rank" }, autorange: "reversed", dtick: ranks > 16 ? 8 : 1 },
    xaxis: { title: { text: timed ? "seconds" : "tokens" } }, margin: { l: 50, r: 10, t: 10, b: 40 },
  }, CONFIG);
  byId("bars").removeAllListeners?.("plotly_click");
  byId("bars").on("plotly_click", (event) => showHeld(bars[event.points[0].customdata]));
}

function showHeld(bar) {
  const buttons = bar.rows.map((row) => {
    const button = element("button", "", step.keys[row]);
    button.addEventListener("click", () => openRow(row));
    return button;
  });
  const micro = bar.micro === null ? "" : `, micro-batch ${bar.micro}`;
  byId("held").replaceChildren(element("p", "", `Rows of rank ${bar.rank}, mini-batch ${bar.mini}${micro}:`), ...buttons);
}

// Prompts and their rows

const isIdle = (row) => step.rows.idle[row];

function showPrompts() {
  const prompts = new Map();
  if (step.rows.tokens.length) step.keys.forEach((key, row) => {
    const prompt = promptOf(key);
    if (!prompts.has(prompt)) prompts.set(prompt, []);
    prompts.get(prompt).push(row);
  });
  const listed = [...prompts].map(([prompt, rows]) => ({
    prompt, rows,
    tokens: sum(rows.map((row) => step.rows.tokens[row])),
    shared: sum(rows.map((row) => step.rows.shared_tokens[row])),
    reward: mean([...new Map(rows.map((row) => [sessionOf(step.keys[row]), step.rows.reward[row]])).values()]),
    sessions: new Set(rows.map((row) => sessionOf(step.keys[row]))).size,
    idle: rows.filter(isIdle).length,
  }));
  const by = { tokens: (of) => -of.tokens, low: (of) => of.reward ?? Infinity, idle: (of) => -of.idle }[byId("sort").value];
  if (by) listed.sort((a, b) => by(a) - by(b) || 0); // of two that are not known, the difference is no number
  byId("prompts").replaceChildren(...listed.map((of) => {
    const details = element("details");
    details.dataset.prompt = of.prompt;
    const summary = details.appendChild(element("summary"));
    summary.append(element("code", "", of.prompt), element("span", "figures",
      `${count(of.sessions, "session")}, ${count(of.rows.length, "row")}, ${count(of.tokens, "token")}, ` +
      `${Math.round((100 * of.shared) / of.tokens)} % alike, reward ${known(of.reward)}, ${count(of.idle, "idle row")}`));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(tableOf(of.rows));
    });
    return details;
  }));
}

function tableOf(rows) {
  const table = element("table"), { rows: columns } = step;
  const head = table.createTHead().insertRow();
  for (const name of ["row", "", "tokens", "shared", "trained", "reward", "advantage", "weight", "age"]) head.append(element("th", "", name));
  const body = table.createTBody();
  const longest = Math.max(...rows.map((row) => columns.tokens[row]));
  for (const row of [...rows].sort((a, b) => step.order[a] - step.order[b])) {
    const line = body.insertRow();
    line.className = isIdle(row) ? "row idle" : "row";
    line.dataset.row = row;
    line.tabIndex = 0;
    line.append(element("td", "name", step.keys[row].split("_").slice(-2).join("_")));
    const bar = line.appendChild(element("td", "bar")).appendChild(element("div", "line"));
    const part = (name, from, length) => {
      const made = bar.appendChild(element("span", name));
      made.style.left = `${(100 * from) / longest}%`;
      made.style.width = `${(100 * length) / longest}%`;
    };
    const [tokens, shared, trained] = [columns.tokens[row], columns.shared_tokens[row], columns.trained_tokens[row]];
    if (shared) part("shared", 0, shared);
    if (tokens > shared) part("own", shared, tokens - shared);
    if (trained) part("trained", tokens - trained, trained);
    for (const number of [tokens, shared, trained]) line.append(element("td", "", shown(number)));
    const advantage = columns.advantage[row], [reward, weight] = [columns.reward[row], columns.weight[row]];
    line.append(element("td", "", known(reward)));
    // A row without a trained token has no advantage.
    line.append(element("td", advantage > 0 ? "good" : advantage < 0 ? "bad" : "", (trained ? known : shown)(advantage)));
    line.append(element("td", "", known(weight)), element("td", "", shown(columns.age[row])));
    const open = () => toggleTexts(line, row);
    line.addEventListener("click", open);
    line.addEventListener("keydown", (event) => event.key === "Enter" && open());
  }
  return table;
}

function openRow(row) {
  const prompt = promptOf(step.keys[row]);
  const details = [...byId("prompts").children].find((each) => each.dataset.prompt === prompt);
  if (details.children.length === 1) details.append(tableOf(step.keys.map((_, each) => each).filter((each) => promptOf(step.keys[each]) === prompt)));
  details.open = true;
  const line = details.querySelector(`tr[data-row="${row}"]`);
  if (!line.nextSibling?.classList.contains("opened")) toggleTexts(line, row);
  line.scrollIntoView({ block: "center" });
}

function toggleTexts(line, row) {
  if (line.nextSibling?.classList.contains("opened")) return line.nextSibling.remove();
  const cell = element("td", "texts");
  cell.colSpan = line.children.length;
  const opened = element("tr", "opened");
  opened.append(cell);
  line.after(opened);
  const places = Object.entries(step.places).filter(([, of]) => of[row]).map(([call, of]) => {
    const [mini, rank, micro] = of[row];
    return `${call}: mini-batch ${mini}, rank ${rank}` + (micro === null ? "" : `, micro-batch ${micro}`);
  });
  cell.append(element("p", "", [step.keys[row], ...places].join("; ")));
  const other = step.rows.shares_with[row];
  if (other !== null) cell.append(element("p", "", aboutSharing(row, other)));
  for (const parting of step.partings[row]) {
    const { before, mine, its } = "before" in parting ? parting : sidesOf(row, parting);
    cell.append(element("p", "", aboutParting(row, parting, mine, its)), pre(before));
    const sides = cell.appendChild(element("div", "sides"));
    for (const [key, text] of [[step.keys[row], mine], [step.keys[parting.with], its]]) {
      const side = sides.appendChild(element("div"));
      side.append(element("div", "", key), pre(text));
    }
  }
  const texts = step.texts[row];
  if (!texts) return cell.append(element("p", "", "The rollout dump of this step does not have its texts."));
  ["input", "output"].forEach((name, place) => cell.append(element("div", "", name), pre(texts[place])));
}

function aboutSharing(row, other) {
  const shared = step.rows.shared_tokens[row], key = step.keys[other];
  if (shared === step.rows.tokens[row]) return `All its ${count(shared, "token")} are the first of ${key}.`;
  return `Its first ${count(shared, "token")} are also those of ${key}.`;
}

/** Whole texts are there once. Python counts characters, JavaScript units of 16 bits. */
function sidesOf(row, parting) {
  const [mine, its] = [row, parting.with].map((each) => [...step.texts[each].join("")]);
  const part = (text, ...ends) => text.slice(...ends).join("");
  const at = parting.characters;
  return { before: part(mine, 0, at), mine: part(mine, at), its: part(its, at) };
}

function aboutParting(row, parting, mine, its) {
  const name = step.keys[parting.with], after = `after ${count(parting.characters, "character")}`;
  if (mine.length && its.length) return `Its text parts from that of ${name} ${after}, and its tokens after ${shown(parting.shared_tokens)}:`;
  const tokens = step.rows.tokens, shorter = Math.min(tokens[row], tokens[parting.with]);
  const begins = its.length ? `Its text is the beginning of that of ${name}` : `Its text begins with that of ${name}`;
  if (parting.shared_tokens === shorter) return `${begins}, ${after}:`;
  return `${begins}, but their tokens part before: they were tokenized otherwise, or differ in special tokens.`;
}

function pre(text) {
  const made = element("pre");
  if (typeof text === "string") made.textContent = text;
  else made.append(text[0], element("span", "cut", `... ${count(text[1], "character")} ...`), text[2]);
  return made;
}

for (const line of document.querySelectorAll("#summaries tbody tr")) {
  const choose = () => showStep(line.dataset.name);
  line.addEventListener("click", choose);
  line.addEventListener("keydown", (event) => event.key === "Enter" && choose());
}
byId("call").addEventListener("change", showBars);
byId("sort").addEventListener("change", showPrompts);
showCurves();
// The address may name a step and a row of it, as #step-3-0/17; else the newest step is shown.
const [, named, row] = location.hash.match(/^#(step-\d+-\d+)(?:\/(\d+))?$/) ?? [];
const chosen = byId(`packed-${named}`) ? named : document.querySelector("#summaries tbody tr:last-of-type")?.dataset.name;
if (chosen) showStep(chosen).then(() => chosen === named && row < step.rows.tokens.length && openRow(Number(row)));
