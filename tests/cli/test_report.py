"""The report of a run: what is in the file, and what a browser makes of it."""

import base64
import gzip
import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.timing.test_timings import two_ranks
from verl_padding.cli.app import app
from verl_padding.record.step_file import Place, RecordedRow, RecordedStep, write_steps

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
HOSTILE = "</script><script>document.title = 'taken'</script><b>&amp; \u2028"


def row(number: int, key: str, **values: Any) -> RecordedRow:
    defaults = {
        "tokens": 20,
        "trained_tokens": 5,
        "reward": 1.0,
        "advantage": 0.5,
        "idle": False,
        "weight": 1.0,
        "shared_tokens": 0,
        "shares_with": None,
        "age": 0,
        "places": {"actor": Place(0, number % 2, 0), "log_prob": Place(0, 0, None)},
    }
    return RecordedRow(row=number, key=key, **defaults | values)


ROWS = [
    row(0, "a_0_0", tokens=12, shared_tokens=12, shares_with=1),
    row(1, "a_0_1", tokens=34),
    row(2, "a_1_0", tokens=15, shared_tokens=7, shares_with=0, reward=0.25, advantage=0.0, idle=True, trained_tokens=3),
    row(3, "b_0_0", tokens=4321, reward=0.0, advantage=-1.75),
]
TEXTS = {
    "a_0_0": ("say\U0001f600 ", f"one {HOSTILE}"),
    "a_0_1": (f"say\U0001f600 one {HOSTILE} and then", " two"),
    "a_1_0": ("say\U0001f600 ", "uno"),
    "b_0_0": ("x" * 2000 + "the end of a long prompt", "short"),
}


def step_of(rows: list[RecordedRow], **values: Any) -> RecordedStep:
    return RecordedStep(**{"step": 1, "update": 0, "keys": [each.key for each in rows], "rows": rows} | values)


def write_dump(folder: Path, step: int, texts: dict[str, tuple[str, str]], rows: list[RecordedRow]) -> None:
    score = {each.key: each.reward for each in rows}
    lines = [
        {"uid": key, "input": prompt, "output": answer, "score": score[key]} for key, (prompt, answer) in texts.items()
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path) -> Path:
    """Three steps, of which the second is timed, and the third alone that."""
    folder = tmp_path / "my <run>"
    folder.mkdir()
    metrics = [
        {"step": 1, "data": {"critic/score/mean": 0.5, "actor/grad_norm": 0.125, "x": float("nan")}},
        {"step": 2, "data": {"critic/score/mean": 0.75, "actor/grad_norm": 0.0625, "note": "a word"}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    write_steps([step_of(ROWS)], folder / "steps" / "1.jsonl")
    write_steps([step_of(ROWS[:2], step=2, timings=two_ranks())], folder / "steps" / "2.jsonl")
    write_steps([step_of([], step=3, keys=["a_0_0"], timings=two_ranks())], folder / "steps" / "3.jsonl")
    write_dump(folder / "rollouts", 1, TEXTS, ROWS)
    return folder


def report(run: Path, *args: str) -> Path:
    out = run.parent / "report.html"
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(out), *args])
    assert result.exit_code == 0, result.output
    return out


class _Page(HTMLParser):
    """Texts of the elements with an id, and of the cells of each line of the table of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, Any] = {}
        self.lines: list[list[str]] = []
        self.links: list[str] = []
        self.notes: list[str] = []
        self._id: str | None = None
        self._in_cell = self._in_note = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.links += [named[name] or "" for name in ("src", "href") if name in named]
        self._id = named.get("id")
        if tag == "tr":
            self.lines.append([])
        self._in_cell, self._in_note = tag == "td", named.get("class") == "note"

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_note = False

    def handle_data(self, data: str) -> None:
        if self._id and self._id.startswith("packed-"):
            self.packed[self._id.removeprefix("packed-")] = json.loads(gzip.decompress(base64.b64decode(data)))
            self._id = None
        elif self._in_cell:
            self.lines[-1].append(data.strip())
        elif self._in_note:
            self.notes.append(data)


def parsed(page: Path) -> _Page:
    found = _Page()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def report_and_notes(run: Path) -> tuple[_Page, list[str]]:
    """The page, and the lines on standard error."""
    out = run.parent / "report.html"
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return parsed(out), result.stderr.splitlines()


def test_the_file_has_the_numbers_of_the_record_and_asks_for_nothing_else(run):
    page = parsed(report(run))
    # step, prompts, sessions, rows, idle rows, tokens, trained tokens, reward of the sessions
    assert ["1", "2", "3", "4", "1", "4,382", "18", f"{(1 + 0.25 + 0) / 3:.3f}"] in page.lines
    assert page.links == ["data:,"]
    step = page.packed["step-1-0"]
    assert step["keys"] == [each.key for each in ROWS]
    for name in (
        "tokens",
        "trained_tokens",
        "reward",
        "advantage",
        "idle",
        "weight",
        "shared_tokens",
        "shares_with",
        "age",
    ):
        assert step["rows"][name] == [getattr(each, name) for each in ROWS]
    assert step["places"]["actor"] == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]]
    timings = two_ranks()
    assert len(page.packed["step-2-0"]["laps"]) == len(timings)
    assert page.packed["step-2-0"]["laps"][0][:5] == [
        timings[0].call, timings[0].rank, timings[0].mini_batch, timings[0].micro_batch, timings[0].start_s,
    ]  # fmt: skip
    curves = page.packed["curves"]["curves"]
    assert curves["actor/grad_norm"] == [[1, 0.125], [2, 0.0625]]
    assert curves["x"] == [[1, None]]
    assert curves["mean reward of a session"] == [[1, pytest.approx((1 + 0.25 + 0) / 3)]]
    assert "note" not in curves


def test_texts_stand_beside_where_they_part_and_are_cut_unless_asked_for(run):
    step = parsed(report(run)).packed["step-1-0"]
    head, left_out, tail = step["texts"][3][0]
    assert head + tail == "x" * 400 + ("x" * 2000 + "the end of a long prompt")[-400:]
    assert left_out == 2024 - 800
    (uno,) = step["partings"][2]
    assert (uno["with"], uno["shared_tokens"], uno["characters"]) == (0, 7, 5)
    assert (uno["before"], uno["mine"], uno["its"]) == ("say\U0001f600 ", "uno", f"one {HOSTILE}")
    # The row before it in its session is one that it does not share with by the forest's order.
    (before,) = step["partings"][1]
    assert (before["with"], before["shared_tokens"], before["mine"], before["its"]) == (
        0, 12, " and then two", "",
    )  # fmt: skip
    whole = parsed(report(run, "--texts")).packed["step-1-0"]
    assert whole["texts"][3] == [*TEXTS["b_0_0"]]
    assert whole["partings"][2] == [{"with": 0, "shared_tokens": 7, "characters": 5}]


def test_steps_may_be_chosen_and_what_cannot_be_shown_is_refused(run, tmp_path):
    assert [*parsed(report(run, "--steps", "2-9")).packed] == ["step-2-0", "step-3-0", "curves"]
    for arguments, cause in (
        (["--steps", "7"], "--steps 7: none of them is recorded. Choose from 1 to 3"),
        (["--steps", "a"], "--steps a: not numbers"),
    ):
        result = CliRunner().invoke(app, ["report", str(run), *arguments])
        assert result.exit_code == 1
        assert cause in result.output.replace("\n", " ")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "padding.record=true" in CliRunner().invoke(app, ["report", str(empty)]).output
    steps = (run / "steps").rename(tmp_path / "elsewhere")
    assert f"No step is recorded in <code>{tmp_path}/my &lt;run&gt;/steps</code>" in report(run).read_text()
    assert [*parsed(report(run, "--record", str(steps), "--steps", "1")).packed] == ["step-1-0", "curves"]
    result = CliRunner().invoke(app, ["report", str(run), "--steps", "3"])
    assert result.exit_code == 1
    assert "--steps 3: none of them is recorded" in result.output.replace("\n", " ")


WHOLE = json.dumps({"uid": "a_0_0", "input": "?", "output": "!", "score": 1.0}) + "\n"
BAD_DUMPS = {
    "empty": "",
    "half a line": WHOLE[:20],
    "a line and a half": WHOLE + WHOLE[:20],
    "pads alone": WHOLE.replace("a_0_0", "pad_0_0"),
    "of something else": '{"input": "?", "output": "!"}\n',
    "of no objects": "1\n",
    "of another type": WHOLE.replace("1.0", '"1.0"'),
}


@pytest.mark.parametrize("text", BAD_DUMPS.values(), ids=BAD_DUMPS)
def test_a_dump_that_cannot_be_read_is_named_and_left_out(text, run):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "data": {"critic/score/mean": 0.5}}\n')
    (run / "rollouts" / "3.jsonl").write_text(text)
    page, said = report_and_notes(run)
    assert page.packed["curves"]["curves"]["mean reward of a session"] == [[1, pytest.approx((1 + 0.25 + 0) / 3)]]
    (note,) = said
    assert note.startswith(f"Left out: {run / 'rollouts' / '3.jsonl'}: ")
    assert note in page.notes


def test_a_record_that_cannot_be_read_is_named_and_left_out_and_a_dump_without_scores_still_gives_texts(run):
    lines = (run / "steps" / "1.jsonl").read_text().splitlines(keepends=True)
    for text in ("", "".join(lines[:2]), lines[0] + lines[1][:9], "{}\n"):
        (run / "steps" / "1.jsonl").write_text(text)
        page, said = report_and_notes(run)
        assert [*page.packed] == ["step-2-0", "step-3-0", "curves"]
        assert [note.split(": ")[1] for note in said if note.startswith("Left out")] == [f"{run}/steps/1.jsonl"]


def metrics_of(step: int, rows: list[RecordedRow], **more: float) -> str:
    scores = [each.reward for each in {each.key.rsplit("_", 1)[0]: each for each in rows}.values()]
    data = {"critic/score/mean": 0.5, "padding/real_rows/total": len(rows)}
    data |= {"padding/session/score/mean": sum(scores) / len(scores), "prompt_length/mean": 10.0}
    data |= {"response_length/mean": sum(each.tokens for each in rows) / len(rows) - 10.0}
    return json.dumps({"step": step, "data": data | more}) + "\n"


OF_ANOTHER_RUN = {
    "nothing": ({}, ROWS, False),
    "the rows": ({"padding/real_rows/total": 5}, ROWS, True),
    "the rewards": ({"padding/session/score/mean": 0.41}, ROWS, True),
    "the tokens": ({"response_length/mean": 1000.0}, ROWS, True),
    "the keys of the dump": ({}, [row(0, "x_0_0")], True),
    "what is not known": ({"padding/session/score/mean": math.nan, "padding/real_rows/total": math.inf}, ROWS, False),
}
"""What differs -> what the metrics have instead, the rows of the dump, and whether the record is of another run."""


@pytest.mark.parametrize(("more", "dumped", "differs"), OF_ANOTHER_RUN.values(), ids=OF_ANOTHER_RUN)
def test_records_that_are_not_of_this_run_are_said_to_be(more, dumped, differs, run):
    for step in (2, 3):
        (run / "steps" / f"{step}.jsonl").unlink()
    (run / "metrics.jsonl").write_text(metrics_of(1, ROWS, **more))
    write_dump(run / "rollouts", 1, {each.key: ("?", "!") for each in dumped}, dumped)
    page, said = report_and_notes(run)
    assert "step-1-0" in page.packed
    assert [note for note in said if "step 1 are not of this run" in note] == page.notes
    assert bool(page.notes) == differs


def test_records_that_the_metrics_do_not_have_are_said_to_be(run):
    (run / "metrics.jsonl").write_text(metrics_of(1, ROWS))
    page, said = report_and_notes(run)
    (note,) = said
    assert "metrics.jsonl does not have 2 steps from 2 to 3" in note
    assert page.notes == said
    (run / "metrics.jsonl").unlink()
    assert report_and_notes(run)[1] == [], "there are no metrics to be of"


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -math.inf])
def test_a_reward_or_a_metric_that_is_not_known_is_shown_as_unknown(unknown, run):
    rows = [row(0, "a_0_0", reward=1.0), row(1, "a_1_0", reward=math.nan if unknown is None else unknown)]
    write_steps([step_of(rows)], run / "steps" / "1.jsonl")
    write_dump(run / "rollouts", 1, {each.key: ("?", "!") for each in rows}, rows)
    data = {"critic/score/mean": unknown, "padding/session/score/mean": unknown, "padding/real_rows/total": unknown}
    lines = [{"step": 1, "data": {"critic/score/mean": unknown}}, {"step": 2, "data": data}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = parsed(report(run))
    assert ["1", "1", "2", "2", "0", "40", "10", "unknown"] in page.lines
    assert page.packed["step-1-0"]["rows"]["reward"] == [1.0, None]
    curves = page.packed["curves"]["curves"]
    assert curves["mean reward of a session"] == curves["critic/score/mean"] == [[1, None], [2, None]]


def test_metrics_that_are_not_verls_are_refused_in_a_line_and_no_page_is_written(run, tmp_path):
    for text in ("{\n", "1\n", '{"step": "x", "data": {}}\n', '{"step": Infinity, "data": {}}\n', '{"data": {}}\n'):
        (run / "metrics.jsonl").write_text(text)
        result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")])
        assert result.exit_code == 1
        assert "metrics.jsonl: not metrics of verl's file logger" in result.output
        assert not [*tmp_path.glob("page*")]


def test_the_reward_of_a_session_is_the_logged_one_where_there_is_one(run):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "data": {"critic/score/mean": 0.5, "padding/session/score/mean": 0.125}}\n')
    (run / "rollouts" / "3.jsonl").write_text("no rewards are read of this step\n")
    curves = parsed(report(run, "--steps", "1")).packed["curves"]["curves"]
    assert curves["mean reward of a session"] == [[1, pytest.approx((1 + 0.25 + 0) / 3)], [3, 0.125]]


def test_ranks_are_counted_where_no_seconds_are(run):
    write_steps([step_of([row(0, "a_0_0", places={"actor": Place(0, 70, 0)})])], run / "steps" / "1.jsonl")
    assert parsed(report(run)).packed["step-1-0"]["ranks"] == 71


class _Opened:
    """What a browser has made of a page, and said in its console."""

    def __init__(self, page: Path, folder: Path, *, at: str = "", seconds: int = 20):
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
            f"--user-data-dir={folder}", f"--timeout={seconds * 1000}", "--virtual-time-budget=20000",
            f"{page.as_uri()}{at}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60)
        self.dom = done.stdout
        self.console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    def visible(self, element: str) -> str:
        """Text of the elements of this name, one after the other, entities as they are."""
        return " | ".join(
            re.sub(r"<[^>]*>", " ", each) for each in re.findall(rf"<{element}\b.*?</{element}>", self.dom)
        )


def texts_of(dom: str) -> list[str]:
    return re.findall(r"<pre>(.*?)</pre>", dom, re.DOTALL)


needs_a_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")


@needs_a_browser
def test_a_browser_shows_a_row_its_tree_and_its_texts_without_an_error(run, tmp_path):
    opened = _Opened(report(run), tmp_path / "profile", at="#step-1-0/2")
    assert opened.console == []
    assert "<title>my &lt;run&gt;: a run of verl_padding</title>" in opened.dom
    assert "Step 1" in opened.visible("h2")
    body = opened.dom.split('id="prompts"')[1].split("<script")[0]
    assert "4,321 tokens" in body
    assert "2 sessions, 3 rows, 61 tokens, 31 % alike, reward 0.625, 1 idle row" in body
    # In the order of the tree: the longest, its beginning, and the row that parts from that.
    assert re.findall(r'data-row="(\d)"', body) == ["1", "0", "2"]
    assert "Its first 7 tokens are also those of a_0_0." in body
    assert "after 5 characters" in body
    assert "uno" in body
    assert texts_of(_Opened(report(run, "--texts"), tmp_path / "profile", at="#step-1-0/2").dom) == texts_of(opened.dom)
    assert "one &lt;/script&gt;&lt;script&gt;document.title" in body
    assert len(re.findall(r'class="main-svg"', opened.dom)) >= 3


@needs_a_browser
def test_a_browser_shows_a_reward_that_is_not_known_as_unknown_and_prompts_with_one_last(run, tmp_path):
    half = [row(0, "a_0_0", reward=math.nan), row(1, "a_1_0", reward=1.0), row(2, "b_0_0", reward=0.5)]
    write_steps([step_of(half)], run / "steps" / "1.jsonl")
    opened = _Opened(report(run, "--steps", "1"), tmp_path / "profile", at="#step-1-0/0")
    assert opened.console == []
    assert "unknown" in opened.visible("td")
    body = opened.dom.split('id="prompts"')[1].split("<script")[0]
    assert re.findall(r"reward ([\w.]+),", body) == ["unknown", "0.500"]


@needs_a_browser
def test_a_browser_shows_the_seconds_of_a_timed_step(run, tmp_path):
    page = report(run)
    alone = _Opened(page, tmp_path / "profile")
    assert alone.console == []
    assert "Step 3" in alone.visible("h2")
    assert "Seconds of each rank" in alone.visible("p")
    opened = _Opened(page, tmp_path / "profile", at="#step-2-0/0")
    assert opened.console == []
    assert "The rollout dump of this step does not have its texts." in opened.visible("td")
    assert re.findall(r'<option value="(\w+)"', opened.dom.split('id="call"')[1].split("</select>")[0]) == [
        "actor",
        "log_prob",
    ]


@needs_a_browser
def test_2000_rows_a_step_are_shown_when_they_are_asked_for(tmp_path):
    run, draws = tmp_path / "run", random.Random(0)
    words = ["".join(draws.choices(ascii_lowercase, k=6)) for _ in range(5000)]
    numbers = count()
    rows = [
        row(next(numbers), f"p{prompt}_{session}_{index}", places={"actor": Place(index % 2, session, prompt % 10)})
        for prompt in range(50)
        for session in range(8)
        for index in range(5)
    ]
    texts = {each.key: (" ".join(draws.choices(words, k=500)), " ".join(draws.choices(words, k=80))) for each in rows}
    for step in (1, 2):
        write_steps([step_of(rows, step=step)], run / "steps" / f"{step}.jsonl")
        write_dump(run / "rollouts", step, texts, rows)
    page = report(run)
    steps = re.findall(r'id="packed-step-[^>]*>([^<]*)<', page.read_text())
    print(f"bytes of a step: {len(steps[0]):,}, of the page: {page.stat().st_size:,}")
    opened = _Opened(page, tmp_path / "profile", at="#step-2-0/1999")
    assert opened.console == []
    assert "p49_7_4" in opened.dom.split('id="prompts"')[1].split("<script")[0]
    assert opened.dom.count("<details") == 50
