"""The curves of padded runs and of stock verl's, from the files that they leave."""

import json
import math

import pytest

from tests.support.run_folder import write_run
from verl_padding.cli.curves import SESSION_REWARD, read_curves
from verl_padding.record.run_files import METRICS, ROLLOUTS


def change_metrics(folder, step, **values):
    entries = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    entries[step - 1]["data"] |= values
    (folder / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_a_logged_reward_of_a_session_needs_no_dump(tmp_path):
    folder = write_run(tmp_path, padded=True)
    (folder / ROLLOUTS / "2.jsonl").write_text("nobody reads it")
    change_metrics(folder, 2, **{"padding/session/score/mean": 0.125})
    curves, notes = read_curves(folder)
    assert (curves[SESSION_REWARD], notes) == ({1: 0.25, 2: 0.125}, [])
    change_metrics(folder, 2, **{"padding/session/score/mean": None})
    curves, _ = read_curves(folder)
    assert curves[SESSION_REWARD] == {1: 0.25, 2: pytest.approx(math.nan, nan_ok=True)}
