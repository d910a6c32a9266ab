"""The demo: its folder, its lines, its page and its exit code. End-to-end tests run the job
itself."""

import re

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
    assert demo.run_demo(steps=2, out=tmp_path / "run", seed=4) == 1
    assert f"ended with code 1; its output is in {tmp_path}/run/log" in capsys.readouterr().out
    assert "+padding=fast" in jobs[0]
    assert "trainer.total_training_steps=2" in jobs[0]
    seeds = {override for override in jobs[0] if "seed" in override.split("=")[0]}
    assert {seed.split("=")[1] for seed in seeds} == {"4"}


def test_the_demo_shows_its_steps_and_ends_with_its_page(monkeypatch, tmp_path, capsys):
    def job(overrides, *, folder, on_line):
        """Leaves a run of two steps."""
        write_run(folder, padded=True)
        on_line("a line of the job")
        return 0

    monkeypatch.setattr(demo, "run_local_job", job)
    assert demo.run_demo(steps=2, out=tmp_path) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/report.html" in output
    steps = [line.split() for line in output.split("\n") if re.match(r" +\d  ", line)]
    assert steps == [
        ["1", "0.5", "nan", "1", "1", "0.1", "nan"],
        ["2", "0.5", "nan", "1", "1", "0.2", "nan"],
    ]
    rewards = parsed(tmp_path / "report.html").packed["curves"]["curves"][
        "mean reward of a session"
    ]
    assert rewards == {str(tmp_path): [[1, 0.25], [2, 0.5]]}
