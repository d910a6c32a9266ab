"""A job's command, followed: its output is in the log, and a line for each step is shown."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOB = """
import json, os, sys
print("noise of Ray", flush=True)
print("noise of torch", file=sys.stderr, flush=True)
for step in (1, 2):
    data = {"critic/score/mean": 0.25 * step, "padding/real_rows/total": 300 + step, "timing_s/step": 1.5}
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "w" if step == 1 else "a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
    print(f"step {step} is done", flush=True)
sys.exit(int(sys.argv[1]))
"""


def follow(out: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl_padding.runs.follow", str(out), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def started(out: Path, code: str) -> subprocess.Popen[str]:
    """A job in a process group of its own that has output that it is ready."""
    command = [sys.executable, "-m", "verl_padding.runs.follow", str(out), sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0)
    deadline = time.monotonic() + 30
    while not ((out / "log").exists() and "ready" in (out / "log").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_steps_are_shown_noise_is_in_the_log_and_the_last_line_reports_where_all_is(tmp_path):
    out = tmp_path / "runs" / "one"
    result = follow(out, JOB, "0")
    assert result.returncode == 0
    assert result.stderr == ""
    begin, heading, first, second, last = result.stdout.splitlines()
    assert begin == f"The output of the job is in {out}/log."
    assert heading == "step  row reward  rows  pads  steps taken  fewest rows  grad norm  seconds"
    assert first.split() == ["1", "0.250", "301", "-", "-", "-", "-", "1.5"]
    assert second.split() == ["2", "0.500", "302", "-", "-", "-", "-", "1.5"]
    for path in ("metrics.jsonl", "rollouts", "log"):
        assert f"{out}/{path}" in last
    assert last.endswith(f"verl-padding compare {out} --picture {out}/curves.png")
    assert set((out / "log").read_text().splitlines()) == {
        *("noise of Ray", "noise of torch", "step 1 is done", "step 2 is done")
    }


def test_the_log_of_an_earlier_run_stays(tmp_path):
    for output in ("first", "second"):
        assert follow(tmp_path, f"print('the {output} run')").returncode == 0
    assert (tmp_path / "log").read_text().splitlines() == ["the first run", "the second run"]


def test_a_job_that_fails_shows_the_end_of_its_log_and_its_code(tmp_path):
    result = follow(tmp_path, f"print('early ' * 3)\nfor line in range(50): print(line)\n{JOB}", "3")
    assert result.returncode == 3
    assert "noise of torch" in result.stderr
    assert "early" not in result.stderr
    assert f"The job ended with code 3; its output is in {tmp_path}/log." in result.stderr
    assert "early" in (tmp_path / "log").read_text()
    assert "verl-padding compare" not in result.stdout


def test_an_earlier_runs_steps_are_not_shown_again(tmp_path):
    follow(tmp_path, JOB, "0")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    refused = follow(tmp_path, "raise SystemExit('refused')")
    assert refused.returncode == 1
    assert "refused" in refused.stderr
    assert len(refused.stdout.splitlines()) == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert len(follow(tmp_path, JOB.replace("1.5", "2.5"), "0").stdout.splitlines()) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_what_it_reports_last_is_in_the_log(number, tmp_path):
    job = """
import signal, sys, time
def end(number, frame):
    sys.exit(f"ended by {number}")
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGHUP, end)
print("ready", flush=True)
time.sleep(60)
"""
    process = started(tmp_path, job)
    if number == signal.SIGTERM:
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)  # as a terminal does
    _, output = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"ended by {int(number)}" in (tmp_path / "log").read_text()
    assert f"ended by {int(number)}" in output


def test_nobody_who_reads_what_is_shown_ends_no_job(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "verl_padding.runs.follow", str(tmp_path), sys.executable, "-c", JOB, "0"]
    subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, check=False)
    os.close(writer)
    assert "step 2 is done" in (tmp_path / "log").read_text()
