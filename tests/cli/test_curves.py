"""The curves of padded runs and of stock verl's, from the files that they leave."""

import json
import math

import pytest

from tests.support.run_folder import write_run
from verl_padding.cli.curves import SESSION_REWARD, StockRule, read_curves
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


@pytest.mark.parametrize(("rows", "padded", "steps"), [(1, 48, 3), (48, 48, 3), (49, 96, 6)])
def test_stock_verl_pads_to_the_multiple_of_ranks_and_mini_batches(rows, padded, steps):
    rule = StockRule(dp_size=2, actor_rows=16, critic_rows=24)
    assert (rule.padded_rows(rows), rule.optimizer_steps(rows)) == (padded, steps)
