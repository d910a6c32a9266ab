"""The demo's folder, its verdict and its exit code; the job itself is run by the end-to-end tests and by hand."""

import json

import pytest
from typer.testing import CliRunner

from tests.support.run_folder import write_run
from verl_padding.cli import demo
from verl_padding.cli.app import app
from verl_padding.errors import PaddingDataError


def test_the_command_passes_on_its_options_and_the_jobs_exit_code(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: seen.update(options) or 7)
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path / "a"), "--stock", "--seed", "5"])
    assert result.exit_code == 7
    assert seen == {"steps": 3, "out": tmp_path / "a", "stock": True, "images": False, "seed": 5}


@pytest.mark.parametrize("name", ["thesis.tex", "metrics.jsonl"])
def test_a_folder_that_is_not_empty_is_refused_in_one_line_and_stays_as_it_is(name, tmp_path):
    (tmp_path / name).write_text("years of work")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == f"{tmp_path}: is not empty. Name a new folder, or remove this one.\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "years of work"


def test_a_failed_job_is_reported_with_its_log_and_is_the_same_for_the_same_seed(monkeypatch, tmp_path, capsys):
    jobs = []
    monkeypatch.setattr(demo, "run_local_job", lambda overrides, **options: jobs.append(overrides) or 1)
    for name, stock in (("padded", False), ("stock", True)):
        assert demo.run_demo(steps=2, out=tmp_path / name, stock=stock, seed=4) == 1
        assert f"ended with code 1; its output is in {tmp_path}/{name}/log" in capsys.readouterr().out
    assert "+padding=prompt" in jobs[0]
    assert not [override for override in jobs[1] if "padding." in override]
    assert "trainer.total_training_steps=2" in jobs[0]
    seeds = {override for override in jobs[0] if "seed" in override.split("=")[0]}
    assert {seed.split("=")[1] for seed in seeds} == {"4"}
    assert {"padding.seed=4", "data.seed=4", "actor_rollout_ref.rollout.seed=4"} <= seeds
    assert any("tiny_qwen2_seed4" in override for override in jobs[0])
    with pytest.raises(PaddingDataError, match="not empty"):
        demo.run_demo(steps=2, out=tmp_path / "stock", stock=True)


def finished_run(monkeypatch, rewards, *, padded=True, code=0, last_dump="whole"):
    """Has the job leave a run with these rewards, and end with a code; its last dump may be no more than this text."""

    def job(overrides, *, folder, on_line):
        write_run(folder, padded=padded, real_rows=(6,) * len(rewards))
        for step, reward in enumerate(rewards, start=1):
            path = folder / "rollouts" / f"{step}.jsonl"
            rows = [json.loads(line) | {"score": reward} for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if last_dump is None:
            path.unlink()
        elif last_dump != "whole":
            path.write_text(last_dump)
        on_line("a line of the job")
        return code

    monkeypatch.setattr(demo, "run_local_job", job)


RISE = [0.01 * step for step in range(40)]


@pytest.mark.parametrize(
    ("rewards", "code", "shown"),
    [
        ([*RISE, *[0.99] * 20], 0, "The agent has learned its task"),
        ([*RISE, *[0.4] * 20], demo.NOT_LEARNED, "no step reached it"),
        ([*RISE, *[0.99] * 8, 0.1, *[0.99] * 11], demo.NOT_LEARNED, "the lowest reward since then is 0.100"),
        ([*RISE, 0.96, *[0.92] * 19], demo.NOT_LEARNED, "step 41 was the first to reach it"),
        ([0.0, 0.1, 0.2], 0, "3 steps cannot show whether"),
    ],
)
def test_the_demo_reports_whether_it_has_learned_and_its_exit_code_does_too(
    rewards, code, shown, monkeypatch, tmp_path, capsys
):
    finished_run(monkeypatch, rewards)
    assert demo.run_demo(steps=len(rewards), out=tmp_path, stock=False) == code
    output = capsys.readouterr().out
    assert shown in output
    assert f"is {sum(rewards[-10:]) / len(rewards[-10:]):.3f} over the last" in output
    assert "verl's rule" in output
    assert (tmp_path / "reward.png").is_file()


@pytest.mark.parametrize(
    ("steps", "rewards", "is_ended"),
    [
        # The dump of the last step that is logged may not be whole.
        (None, [*RISE, *[0.99] * 11], True),
        (None, [*RISE, *[0.99] * 10], False),
        (None, [*RISE, *[0.99] * 9, 0.1, 0.99], False),
        (60, [*RISE, *[0.99] * 11], False),
    ],
)
def test_without_a_number_of_steps_the_demo_ends_its_job_once_the_agent_has_learned(
    steps, rewards, is_ended, monkeypatch, tmp_path
):
    finished_run(monkeypatch, rewards, code=9)
    assert demo.run_demo(steps=steps, out=tmp_path, stock=False) == (0 if is_ended else 9)


@pytest.mark.parametrize("last_dump", ["", "half a li", None], ids=["empty", "half written", "missing"])
def test_what_the_job_logs_and_dumps_while_it_is_ended_is_not_of_the_run(last_dump, monkeypatch, tmp_path, capsys):
    finished_run(monkeypatch, [*RISE, *[0.99] * 10, 0.1], last_dump=last_dump)
    assert demo.run_demo(steps=None, out=tmp_path, stock=False) == 0
    assert "The agent has learned its task: the mean reward of a session is 0.990" in capsys.readouterr().out


def test_stock_verl_is_judged_by_the_same_goal(monkeypatch, tmp_path, capsys):
    finished_run(monkeypatch, [0.4] * 60, padded=False)
    assert demo.run_demo(steps=60, out=tmp_path, stock=True) == demo.NOT_LEARNED
    output = capsys.readouterr().out
    assert "The agent has not learned its task" in output
    assert "verl's rule" not in output, "the run itself is one of stock verl"
    steps = [line.split() for line in output.split("\n") if line.startswith("   7  ")]
    assert steps == [["7", "0.500", "-", "-", "-", "-", "0.700", "-"]]
