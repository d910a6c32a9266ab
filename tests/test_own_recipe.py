"""The recipe of docs/quickstart.md and the job of docs/your_job.md, by the pages' own files and
commands."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from tests.support.pages import FENCE, ROOT, commands_of, make_own_recipe, own_recipe_text
from verl_padding.on_cpu.launch import LOG, run_command
from verl_padding.record.run_files import read_metrics

RUN = Path("outputs/guess_tiny")


def test_the_page_shows_the_agent_loop_of_the_recipe():
    (loop,) = (
        match["code"]
        for match in FENCE.finditer(own_recipe_text())
        if match["language"] == "python"
    )
    assert (ROOT / "recipes/guess/guess_loop.py").read_text().endswith(f"\n{loop}")


def test_the_files_that_the_page_names_are_those_of_the_recipe(own_recipe):
    listed = re.findall(r"^\| ([^|]+) \|", own_recipe_text(), re.MULTILINE)
    named = {name for cell in listed for name in re.findall(r"`(\w+\.\w+)`", cell)}
    files = {path.name for path in (ROOT / "recipes/guess").iterdir() if path.is_file()}
    assert named == files - {"__init__.py", "README.md"}


def run_as_printed(command: str, folder: Path) -> None:
    """With the script's own exports alone: what `run_command` adds must not stand in for one that
    is missing."""
    script = (
        'exec env -i HOME="$HOME" PATH="$1:$PATH" TMPDIR="$TMPDIR" RAY_TMPDIR="$RAY_TMPDIR"'
        ' /bin/bash -c "$2"'
    )
    started = ["/bin/bash", "-c", script, "bash", str(Path(sys.executable).parent), command]
    assert run_command(started, folder=folder, timeout_s=900) == 0, (folder / LOG).read_text()[
        -5000:
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_runs_as_it_is_printed_and_is_resumed(tmp_path):
    folder = make_own_recipe(tmp_path)
    _, three_steps, *_ = commands_of(own_recipe_text())
    run_as_printed(three_steps, folder)
    run_as_printed(three_steps.replace("steps=3", "steps=4"), folder)

    run = folder / RUN
    starts = [
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for path in sorted((run / "metrics").iterdir())
    ]
    assert starts == [[1, 2, 3], [4]]
    metrics = dict(read_metrics(run))
    assert [*metrics] == [1, 2, 3, 4]
    assert 0 <= metrics[4]["val-aux/guess/won/mean@1"] <= 1
    for step, data in metrics.items():
        # A row for each guess of 36 prompts in 8 sessions.
        rows = [
            json.loads(line)["uid"].rsplit("_", 1)[0]
            for line in (run / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        ]
        assert len(set(rows)) == 36 * 8
        assert len(rows) == data["padding/real_rows/total"]
        # fast takes a step for as many rows as 9 prompts with a row a session have.
        assert data["padding/actor/optimizer_steps/total"] == math.ceil(len(rows) / (9 * 8))
    assert "Error in _run_prompt" not in (run / "log").read_text()
    assert (run / "report.html").stat().st_size > 10_000
