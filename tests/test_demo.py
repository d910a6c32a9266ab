"""The demo's handling of its folder; the job itself is run by the end-to-end tests and by hand."""

from typer.testing import CliRunner

from verl_padding import demo
from verl_padding.cli import app


def test_the_command_passes_on_its_options_and_the_jobs_exit_code(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: seen.update(options) or 7)
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path / "a"), "--stock"])
    assert result.exit_code == 7
    assert seen == {"steps": 3, "out": tmp_path / "a", "stock": True, "pictures": False}


def test_a_failed_job_is_told_with_its_log_and_other_peoples_files_stay(monkeypatch, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "metrics.jsonl").write_text("of an earlier demo")
    jobs = []

    def failing_job(overrides, *, folder, on_line):
        jobs.append(overrides)
        assert not (folder / "metrics.jsonl").exists()
        return 1

    monkeypatch.setattr(demo, "run_local_job", failing_job)
    assert demo.run_demo(steps=2, out=tmp_path, stock=False) == 1
    assert demo.run_demo(steps=2, out=tmp_path, stock=True) == 1
    assert "+padding=prompt" in jobs[0]
    assert "+padding=prompt" not in jobs[1]
    assert "trainer.total_training_steps=2" in jobs[0]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert "ended with code 1" in capsys.readouterr().out
