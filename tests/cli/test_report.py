"""The report of a run: what is in the file, and what a browser makes of it."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.test_plan import write_lines
from tests.record.test_step_file import PARTED, ROWS, made_step
from tests.support.run_folder import write_run
from tests.support.written_pages import Opened, Page, needs_a_browser, parsed
from verl_padding.cli.app import app
from verl_padding.record.step_file import RecordedRow, write_steps

HOSTILE = "</script><script>document.title = 'taken'</script><b>&amp; \u2028"


TEXTS = {
    "a_0_0": ("say\U0001f600 ", f"one {HOSTILE}"),
    "a_0_1": (f"say\U0001f600 one {HOSTILE} and then", " two"),
    "a_1_0": ("say\U0001f600 ", "uno"),
    "b_0_0": ("x" * 2000 + "the end of a long prompt", "short"),
}


def write_dump(folder: Path, rows: list[RecordedRow]) -> None:
    """Of the first step."""
    said = [dict(zip(("input", "output"), TEXTS[each.key], strict=True)) for each in rows]
    lines = [
        {"uid": each.key, "score": each.reward} | texts
        for each, texts in zip(rows, said, strict=True)
    ]
    (folder / "rollouts").mkdir(exist_ok=True)
    write_lines(folder / "rollouts/1.jsonl", lines)


@pytest.fixture
def run(tmp_path):
    """Three steps."""
    folder = tmp_path / "my <run>"
    folder.mkdir()
    metrics = [
        {
            "step": 1,
            "data": {"critic/score/mean": 0.5, "actor/grad_norm": 0.125, "x": float("nan")},
        },
        {
            "step": 2,
            "data": {"critic/score/mean": 0.75, "actor/grad_norm": 0.0625, "note": "a word"},
        },
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    steps = [
        made_step(step=1),
        made_step(ROWS[:2], step=2),
        made_step(ROWS[:2], step=3),
    ]
    for step in steps:
        write_steps([step], folder / f"steps/{step.step}.jsonl")
    write_dump(folder, ROWS)
    return folder


def report(run: Path, *args: str) -> Path:
    out = run.parent / "report.html"
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(out), *args])
    assert result.exit_code == 0, result.output
    return out


def report_and_notes(run: Path) -> tuple[Page, list[str]]:
    """The page, and the lines on standard error."""
    out = run.parent / "report.html"
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return parsed(out), result.stderr.splitlines()


def test_the_page_has_the_numbers_of_the_record_and_asks_for_nothing_else(run):
    page = parsed(report(run))
    # Name, prompts, sessions, rows, tokens, trained tokens, zero-advantage rows, reward of the
    # sessions.
    reward = f"{(1 + 0.25 + 0) / 3:.3f}"
    assert ["Step 1", "2", "3", "4", "67", "9", "1", reward] in page.lines
    assert page.links == ["data:,"]
    step = page.packed["step-1"]
    assert step["keys"] == [each.key for each in ROWS]
    assert len(step["columns"]) == 8
    for name, column in step["columns"].items():
        assert column == [getattr(each, name) for each in ROWS]
    assert step["shares_with"] == {"0": 1, "2": 0}
    assert {(bar[0], *bar[6]) for bar in step["charts"]["actor"]} == {(0, 2), (1, 0, 1, 3)}
    curves = page.packed["curves"]["curves"]
    assert curves["actor/grad_norm"] == {str(run): [[1, 0.125], [2, 0.0625]]}
    assert curves["x"] == {str(run): [[1, None]]}
    assert curves["mean reward of a session"] == {
        str(run): [[1, pytest.approx((1 + 0.25 + 0) / 3)]]
    }
    assert "note" not in curves


def test_runs_lie_side_by_side(run, tmp_path):
    stock = write_run(tmp_path / "stock", padded=False)
    page = parsed(report(run, str(stock)))
    curves = page.packed["curves"]["curves"]
    assert curves["mean reward of a session"][str(stock)] == [[1, 0.25], [2, 0.5]]
    assert curves["actor/grad_norm"][str(stock)] == [[1, 0.1], [2, 0.2]]


def test_texts_are_cut_and_shown_where_they_branch(run):
    texts = parsed(report(run)).packed["step-1"]["texts"]
    head, left_out, tail = texts[3]["input"]
    assert head + tail == "x" * 400 + ("x" * 2000 + "the end of a long prompt")[-400:]
    assert left_out == 2024 - 800
    uno = texts[2]
    assert (uno["branch_at"], uno["before"], uno["mine"], uno["other"]) == (
        5,
        "say\U0001f600 ",
        "uno",
        f"one {HOSTILE}",
    )
    assert (texts[0]["mine"], texts[0]["other"]) == ("", " and then two"), (
        "one is the beginning of the other"
    )


def test_steps_may_be_chosen_and_a_folder_of_no_run_is_refused(run, tmp_path):
    chosen = parsed(report(run, "--steps", "2", "--steps", "3"))
    assert [chosen.packed[name]["name"] for name in ("step-1", "step-2")] == ["Step 2", "Step 3"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "padding.record=true" in CliRunner().invoke(app, ["report", str(empty)]).output
    (run / "steps").rename(tmp_path / "elsewhere")
    assert "No step is recorded" in report(run).read_text()


WHOLE = json.dumps({"uid": "a_0_0", "input": "?", "output": "!", "score": 1.0}) + "\n"
BAD_DUMPS = {
    "pads alone": WHOLE.replace("a_0_0", "pad_0_0"),
    "of another type": WHOLE.replace("1.0", '"1.0"'),
}


@pytest.mark.parametrize("text", BAD_DUMPS.values(), ids=BAD_DUMPS)
def test_a_dump_that_cannot_be_read_is_named_and_left_out(text, run):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "data": {"critic/score/mean": 0.5}}\n')
    (run / "rollouts" / "3.jsonl").write_text(text)
    page, said = report_and_notes(run)
    (rewards,) = page.packed["curves"]["curves"]["mean reward of a session"].values()
    assert rewards == [[1, pytest.approx((1 + 0.25 + 0) / 3)]]
    note = said[0]
    assert note.startswith(f"Left out: {run / 'rollouts' / '3.jsonl'}")
    assert note in page.notes


def test_what_the_savings_of_a_run_have_saved_is_told(run):
    saved = {"critic/score/mean": 0.5, "padding/computed_tokens/total": 30}
    saved["padding/saved/shared_tokens/total"] = 10
    lines = [json.dumps({"step": step, "data": saved}) for step in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, said = report_and_notes(run)
    assert page.notes == []
    assert said == [f"{run}: saved 20 of 80 tokens (25%): 20 shared"]


@pytest.mark.parametrize("unknown", [None, math.inf])
def test_a_reward_or_a_metric_that_is_not_known_is_shown_as_unknown(unknown, run):
    other = replace(PARTED, row=1, reward=math.nan if unknown is None else unknown)
    rows = [replace(ROWS[0], shares_with=None), other]
    write_steps([made_step(rows, step=1)], run / "steps" / "1.jsonl")
    write_dump(run, rows)
    data = {
        "critic/score/mean": unknown,
        "padding/session/score/mean": unknown,
        "padding/real_rows/total": unknown,
    }
    lines = [{"step": 1, "data": {"critic/score/mean": unknown}}, {"step": 2, "data": data}]
    write_lines(run / "metrics.jsonl", lines)
    page = parsed(report(run))
    assert ["Step 1", "1", "2", "2", "27", "8", "0", "unknown"] in page.lines
    assert page.packed["step-1"]["columns"]["reward"] == [1.0, None]
    curves = page.packed["curves"]["curves"]
    for name in ("mean reward of a session", "critic/score/mean"):
        assert curves[name] == {str(run): [[1, None], [2, None]]}


@needs_a_browser
def test_a_browser_shows_a_row_its_trie_and_its_texts_without_an_error(run, tmp_path):
    opened = Opened(report(run), tmp_path / "profile", at="#step-1/2")
    assert opened.console == []
    assert "<title>my &lt;run&gt;: verl_padding</title>" in opened.dom
    assert '<h2 id="title">Step 1' in opened.dom
    body = opened.prompts
    assert "2 sessions, 3 rows, 47 tokens, 40 % shared, reward 0.625, 1 zero-advantage row" in body
    # In the order of the trie: the longest, its beginning, and the row that branches off that.
    assert re.findall(r'data-row="(\d)"', body) == ["1", "0", "2"]
    assert "first 7 tokens" in body
    assert "for 5 characters" in body
    assert "uno" in body
    assert "one &lt;/script&gt;&lt;script&gt;document.title" in body
    assert len(re.findall(r'class="main-svg"', opened.dom)) >= 3
