"""``verl-padding timeline``."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.timing.test_laps import two_ranks
from verl_padding.cli.app import app
from verl_padding.record.step_file import RecordedStep, write_steps


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "3.jsonl"
    write_steps([RecordedStep(step=3, update=0, keys=["a_0_0", "a_0_1"], laps=two_ranks())], path)
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["timeline", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_step_is_shown_as_a_table(file: Path):
    code, output = run(file)
    assert code == 0
    assert "step 3, 2 rows" in output
    (line,) = [line for line in output.splitlines() if "actor" in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        "actor", "2", "2", "5.00", "1.25", "1.00", "1.250", "16", "0.00",
    ]  # fmt: skip


def test_a_step_is_drawn_and_traced(file: Path):
    picture, trace = file.with_suffix(".png"), file.with_suffix(".json")
    code, output = run(file, "--picture", picture, "--trace", trace)
    assert code == 0, output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--update", "1"], "--update 1: "),
        (["--picture", "/nowhere/step.png"], "No such file or directory: '/nowhere/step.png'"),
        (["--trace", "/nowhere/step.json"], "No such file or directory: '/nowhere/step.json'"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(arguments: list[str], shown: str, file: Path):
    code, output = run(file, *arguments)
    assert code == 1
    assert shown in output
    write_steps([RecordedStep(step=3, update=0, keys=[])], file)
    assert "holds no lap" in run(file)[1]
