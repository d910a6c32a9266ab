"""The demo's handling of its folder and its verdict; the job itself is run by the end-to-end tests and by hand."""

import json
import subprocess
import sys
from configparser import ConfigParser

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from tests.support.pages import ROOT
from tests.support.run_folder import write_run
from verl_padding.cli import demo
from verl_padding.cli.app import app
from verl_padding.cli.demo_folder import LIST
from verl_padding.errors import PaddingDataError


def test_the_command_passes_on_its_options_and_the_jobs_exit_code(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: seen.update(options) or 7)
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--out", str(tmp_path / "a"), "--stock", "--seed", "5"])
    assert result.exit_code == 7
    assert seen == {"steps": 3, "out": tmp_path / "a", "stock": True, "images": False, "seed": 5}


def test_the_old_name_of_an_option_is_taken_and_the_new_one_told(monkeypatch):
    seen = {}
    monkeypatch.setattr(demo, "run_demo", lambda **options: seen.update(options) or 0)
    result = CliRunner().invoke(app, ["demo", "--pictures"])
    assert seen["images"] is True
    assert "--pictures is now called --images" in result.stderr


def test_a_folder_that_cannot_be_the_demos_is_refused_in_one_line(tmp_path):
    (tmp_path / "afile").write_text("years of work")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "afile")])
    assert result.exit_code == 1
    assert result.output.startswith(f"--out={tmp_path}/afile: cannot be made a folder")
    assert result.output.count("\n") == 1


def test_a_failed_job_is_told_with_its_log_and_other_peoples_files_stay(monkeypatch, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "metrics.jsonl").write_text("of an earlier demo")
    (tmp_path / LIST).write_text(json.dumps({"made": ["metrics.jsonl"]}))
    jobs = []

    def failing_job(overrides, *, folder, on_line):
        jobs.append(overrides)
        assert not (folder / "metrics.jsonl").exists()
        return 1

    monkeypatch.setattr(demo, "run_local_job", failing_job)
    assert demo.run_demo(steps=2, out=tmp_path, stock=False, seed=4) == 1
    assert demo.run_demo(steps=2, out=tmp_path, stock=True) == 1
    assert "+padding=prompt" in jobs[0]
    assert "+padding=prompt" not in jobs[1]
    assert "trainer.total_training_steps=2" in jobs[0]
    seeds = {override for override in jobs[0] if "seed" in override.split("=")[0]}
    assert {seed.split("=")[1] for seed in seeds} == {"4"}
    assert {"padding.seed=4", "data.seed=4", "actor_rollout_ref.rollout.seed=4"} <= seeds
    assert any("tiny_qwen2_seed4" in override for override in jobs[0])
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert "ended with code 1" in capsys.readouterr().out


def no_job(overrides, **options):
    raise AssertionError("the job was started")


def test_assets_and_rollouts_of_the_users_own_are_never_deleted(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "run_local_job", no_job)
    (tmp_path / LIST).write_text('{"made": []}')
    for name in ("assets/logo.svg", "rollouts/7.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("years of work")
    with pytest.raises(PaddingDataError, match=r"holds assets/logo\.svg, rollouts/7\.jsonl where the demo"):
        demo.run_demo(steps=2, out=tmp_path, stock=False)
    for name in ("assets/logo.svg", "rollouts/7.jsonl"):
        assert (tmp_path / name).read_text() == "years of work"


def finished_run(monkeypatch, folder, rewards, *, padded=True):
    """Has the job leave a run with these rewards, and gives the overrides it was started with."""

    def job(overrides, *, folder, on_line):
        write_run(folder, padded=padded, real_rows=(6,) * len(rewards))
        for step, reward in enumerate(rewards, start=1):
            path = folder / "rollouts" / f"{step}.jsonl"
            rows = [json.loads(line) | {"score": reward} for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    monkeypatch.setattr(demo, "run_local_job", job)


def test_metrics_that_cannot_be_read_while_the_job_runs_are_told_once_and_do_not_end_it(monkeypatch, tmp_path, capsys):
    said = []

    def job(overrides, *, folder, on_line):
        (folder / "log").write_text("")
        for number in range(3):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write("{}\n")
            on_line(f"line {number}")
            said.append(number)
        return 7

    monkeypatch.setattr(demo, "run_local_job", job)
    assert demo.run_demo(steps=2, out=tmp_path, stock=False) == 7
    assert said == [0, 1, 2]
    told = capsys.readouterr().out
    assert told.count("The job goes on, but not all of it can be shown") == 1
    assert "metrics.jsonl, line 1: not what verl's file logger writes" in told


RISE = [0.01 * step for step in range(40)]


@pytest.mark.parametrize(
    ("rewards", "code", "told"),
    [
        ([*RISE, *[0.99] * 20], 0, "The agent has learned its task"),
        ([*RISE, *[0.4] * 20], demo.NOT_LEARNED, "no step reached 0.95"),
        ([*RISE, *[0.99] * 8, 0.1, *[0.99] * 11], demo.NOT_LEARNED, "fell to 0.100 at step 49"),
        ([*RISE, 0.96, *[0.92] * 19], demo.NOT_LEARNED, "it had reached 0.95 at step 41"),
        ([0.0, 0.1, 0.2], 0, "3 steps cannot show whether"),
    ],
)
def test_the_demo_says_whether_it_has_learned_and_its_exit_code_too(rewards, code, told, monkeypatch, tmp_path, capsys):
    finished_run(monkeypatch, tmp_path, rewards)
    assert demo.run_demo(steps=len(rewards), out=tmp_path, stock=False) == code
    assert told in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "reward.png").is_file()


def test_the_mean_reward_of_a_session_is_told_once(monkeypatch, tmp_path, capsys):
    finished_run(monkeypatch, tmp_path, [*RISE, *[0.99] * 20])
    demo.run_demo(steps=60, out=tmp_path, stock=False)
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("mean reward of a session") == 1
    assert "is 0.990 over the last 10 steps, after 0.000 at the first step, and the goal is 0.95" in told


def test_stock_verl_is_judged_by_the_same_goal_and_its_steps_are_told_at_the_end(monkeypatch, tmp_path, capsys):
    finished_run(monkeypatch, tmp_path, [0.4] * 60, padded=False)
    assert demo.run_demo(steps=60, out=tmp_path, stock=True) == demo.NOT_LEARNED
    told = capsys.readouterr().out
    assert "The agent has not learned its task" in " ".join(told.split())
    lines = told.split("\n")
    # While it runs, only what stock verl logs.
    assert "step  row reward  grad norm  seconds" in lines
    assert [line.split() for line in lines if line.startswith("   7  ")] == [["7", "0.500", "0.700", "-"]]
    # 6 rows, 2 ranks, mini-batches of 2 prompts x 3: no pad, a step.
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert table[6] == ["7", "0.400", "6", "0", "1"]
    assert len(table) >= 60


def test_images_without_their_packages_are_refused_with_the_command_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "run_local_job", no_job)
    monkeypatch.setattr(demo, "find_spec", lambda module: None if module != "PIL" else object())
    result = CliRunner().invoke(app, ["demo", "--images", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output == (
        "--images: needs torchvision, qwen-vl-utils, not installed here. Install the extra in a checkout: "
        'pip install -e ".[vision]".\n'
    )
    assert not (tmp_path / "out").exists()


def test_the_packages_of_images_are_those_of_the_extra():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extra = setup["options.extras_require"]["vision"].split()
    assert {Requirement(package).name for package in extra} == set(demo.VISION.values())


NOISY = """
import os, sys, warnings
from pathlib import Path
from verl_padding.cli import demo

def noisy_job(*args, **options):
    print("a library prints")
    warnings.warn("a library warns")
    sys.stderr.write("Writing model shards: 100%|####|")
    os.write(2, b"C++ warns\\n")
    return []

demo.demo_job = noisy_job
demo.run_local_job = lambda overrides, **options: 3
print("before")
sys.exit(demo.run_demo(steps=1, out=Path(sys.argv[1]), stock=False))
"""


def test_what_libraries_print_is_in_the_log_and_not_on_the_terminal(tmp_path):
    command = [sys.executable, "-c", NOISY, tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 3, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith("before\n")
    assert "The job ended with code 3" in " ".join(result.stdout.split())
    log = (tmp_path / "out" / "log").read_text()
    for noise in ("a library prints", "a library warns", "Writing model shards", "C++ warns"):
        assert noise in log
        assert noise not in result.stdout


def test_the_help_tells_the_exit_codes():
    told = " ".join(CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200"}).output.split())
    assert f"{demo.NOT_LEARNED} if the job ran to its end and the agent has not learned" in told
