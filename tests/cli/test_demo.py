"""The demo: its folder, its lines, its page and its exit code. End-to-end tests run the job
itself."""

import re

import pytest
from typer.testing import CliRunner

from tests.support.run_folder import write_run
from tests.support.written_pages import parsed
from verl_padding.cli import demo
from verl_padding.cli.app import app


def test_a_folder_that_is_not_empty_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert f"{tmp_path}: is not empty." in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_job_is_reported_with_its_log_and_has_the_seed(monkeypatch, tmp_path, capsys):
    jobs = []
    monkeypatch.setattr(
        demo, "run_local_job", lambda overrides, **options: jobs.append(overrides) or 1
    )
    for name, stock in (("padded", False), ("stock", True)):
        assert demo.run_demo(steps=2, out=tmp_path / name, stock=stock, seed=4) == 1
        assert (
            f"ended with code 1; its output is in {tmp_path}/{name}/log" in capsys.readouterr().out
        )
    assert "+padding=fast" in jobs[0]
    assert not [override for override in jobs[1] if "padding." in override]
    assert "trainer.total_training_steps=2" in jobs[0]
    seeds = {override for override in jobs[0] if "seed" in override.split("=")[0]}
    assert {seed.split("=")[1] for seed in seeds} == {"4"}


def finished_run(monkeypatch, *, padded):
    """Has the job leave a run of two steps."""

    def job(overrides, *, folder, on_line):
        write_run(folder, padded=padded)
        on_line("a line of the job")
        return 0

    monkeypatch.setattr(demo, "run_local_job", job)


@pytest.mark.parametrize("padded", [True, False])
def test_the_demo_shows_its_steps_and_ends_with_its_page(padded, monkeypatch, tmp_path, capsys):
    finished_run(monkeypatch, padded=padded)
    assert demo.run_demo(steps=2, out=tmp_path, stock=not padded) == 0
    output = capsys.readouterr().out
    assert f"Its page is {tmp_path}/report.html" in output
    steps = [line.split() for line in output.split("\n") if re.match(r" +\d  ", line)]
    pads, taken = ("1", "1") if padded else ("-", "-")
    assert steps == [
        ["1", "0.500", "-", pads, taken, "0.100", "-"],
        ["2", "0.500", "-", pads, taken, "0.200", "-"],
    ]
    rewards = parsed(tmp_path / "report.html").packed["curves"]["curves"][
        "mean reward of a session"
    ]
    assert rewards == {str(tmp_path): [[1, 0.25], [2, 0.5]]}
