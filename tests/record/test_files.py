"""Files of runs that hold something else: all that reads them refuses them in a line."""

import json

import pytest
from typer.testing import CliRunner

from tests.cli.test_report import report_and_notes, run
from tests.record.test_step_file import made_step
from tests.support.run_folder import write_run
from verl_padding.cli.app import app
from verl_padding.record.step_file import write_steps

__all__ = ["run"]  # the fixture


def write_bytes(content):
    return lambda path: path.write_bytes(content)


def endless(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


ODD_FILES = {
    "endless": endless,
    "no UTF-8": write_bytes(b"\xff\xfe\n"),
    "torn": write_bytes(b'{"uid": "a_0_0", '),
    "lists": write_bytes(b"[" * 2000 + b"\n"),
    "nulls": write_bytes(
        b'{"step": 1, "data": {"critic/score/mean": null, "padding/computed_tokens/total": null}}\n'
    ),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/1.jsonl"])
@pytest.mark.parametrize("odd", ODD_FILES)
def test_an_odd_file_of_a_run_is_left_out_or_refused_in_a_line(odd, name, tmp_path):
    folder = write_run(tmp_path / "run", padded=False)
    ODD_FILES[odd](folder / name)
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
    said = [line for line in result.stderr.splitlines() if str(folder / name) in line]
    assert isinstance(result.exception, SystemExit | None), "an error of one line"
    assert result.exit_code == 0 or name == "metrics.jsonl"
    # A number that is not known is shown so, and a line that is half written is yet to come.
    taken = {("metrics.jsonl", "nulls"), ("metrics.jsonl", "torn")}
    assert len(said) == ((name, odd) not in taken)
    assert len(result.stderr) < 2000


ODD_VALUES = [
    ("tokens", True),
    ("tokens", 10**30),
    ("shared_tokens", 13),
    ("shares_with", 9),
    ("row", 1),
    ("reward", 1e400),
    ("staleness", -1),
    ("places", {"actor": [0, "x", 0]}),
]


@pytest.mark.parametrize(("name", "value"), ODD_VALUES)
def test_a_record_with_a_value_of_another_kind_is_left_out(name, value, run):
    write_steps([made_step(step=1)], run / "steps" / "1.jsonl")
    lines = [json.loads(line) for line in (run / "steps" / "1.jsonl").read_text().splitlines()]
    next(line for line in lines if name in line)[name] = value
    (run / "steps" / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, (note,) = report_and_notes(run)
    assert note.startswith(f"Left out: {run}/steps/1.jsonl")
    assert page.packed["step-1"]["name"] == "Step 2"
