"""The record of a step, from a trainer's local updates on the real TransferQueue."""

import pytest
import torch
from verl.trainer.ppo.v1 import get_trainer_cls

from tests.support.rows_in_queue import put_columns
from tests.support.sessions_that_grow import put_grown_sessions
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.job.calls import ACTOR, LOG_PROB
from verl_padding.record.step_file import Place, read_steps

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

IDS = {
    "a_0_0": ([1, 2, 3], [4, 5]),
    "a_0_1": ([1, 2, 3, 4, 5, 6], [7]),
    "a_1_0": ([1, 2, 3], [4, 9, 9]),
    "b_0_0": ([1, 2], [3]),
    "c_0_0": ([8], [8]),
    "d_0_0": ([9], [9]),
}


def trained_step(monkeypatch, *overrides, local_updates=1):
    """A trainer after a step of rows with these IDS, and its metrics; in each local update, uids
    get another letter."""
    trainer, stock = padded_trainer("padding.packer=plan", *overrides), get_trainer_cls("sync")
    trainer.prepare_step, trainer.parameter_sync_step = dict, local_updates
    letters = iter("xyz")

    def update(self, metrics, *_):
        letter = next(letters)
        masks = [torch.ones(len(response), dtype=torch.int64) for _, response in IDS.values()]
        masks[-1][:] = 0
        scores = [
            torch.tensor([0.0] * (len(mask) - 1) + [float(number)])
            for number, mask in enumerate(masks)
        ]
        batch = put_grown_sessions(
            {letter + key: ids for key, ids in IDS.items()},
            response_mask=masks,
            rm_scores=scores,
            loss_weight=[1.0, 2.0, 1.0, 1.0, 1.0, 1.0],
        )
        batch = self._balance_batch(batch, metrics)
        put_columns(
            batch, advantages=[torch.arange(len(mask), dtype=torch.float32) for mask in masks]
        )
        return batch

    monkeypatch.setattr(stock, "_step_once", update)
    monkeypatch.setattr(stock, "_compute_metrics", lambda *_, **__: None)
    metrics = {}
    batch, timing = trainer.step(metrics, {}), {"step": 2.0}
    trainer._compute_metrics(batch, metrics, timing, global_steps=7, epoch=0)
    return trainer, metrics


@pytest.mark.parametrize("local_updates", [1, 2])
def test_a_row_is_recorded_with_its_worth_its_places_and_what_it_shares(
    local_updates, monkeypatch, tmp_path
):
    folder = tmp_path / "steps"
    trainer, _ = trained_step(
        monkeypatch,
        "padding.record=true",
        f"trainer.default_local_dir={tmp_path}",
        local_updates=local_updates,
    )
    updates = read_steps(folder / "7.jsonl")
    assert [update.update for update in updates] == list(range(local_updates))
    for letter, update in zip("xyz", updates, strict=False):
        assert (update.step, list(update.keys)) == (7, [letter + key for key in IDS])
        rows = {row.key.removeprefix(letter): row for row in update.rows}
        assert [row.row for row in update.rows] == list(range(6))
        assert {key: row.tokens for key, row in rows.items()} == {
            "a_0_0": 5, "a_0_1": 7, "a_1_0": 6, "b_0_0": 3, "c_0_0": 2, "d_0_0": 2,
        }  # fmt: skip
        assert [row.trained_tokens for row in rows.values()] == [2, 1, 3, 1, 1, 0]
        assert [row.reward for row in rows.values()] == [0, 1, 2, 3, 4, 5]
        assert [row.advantage for row in rows.values()] == [0.5, 0, 1, 0, 0, None]
        assert [row.zero_advantage for row in rows.values()] == [
            False,
            True,
            False,
            True,
            True,
            True,
        ]
        assert {row.staleness for row in rows.values()} == {5}, "the weights of step 1, in step 7"
        # a_1_0 has the largest tokens, then a_0_1, which branches off it, then a_0_0, which a_0_1
        # begins with.
        shares = {
            key: (row.shared_tokens, row.shares_with)
            for key, row in rows.items()
            if row.shared_tokens
        }
        assert shares == {"a_0_1": (4, 2), "a_0_0": (5, 1)}
        assert rows["a_0_1"].weight / rows["a_0_0"].weight == pytest.approx(2)
        layout = trainer.steps._updates[update.update].plan.layouts[ACTOR]
        for row in update.rows:
            place = row.places[ACTOR]
            assert row.row in layout.rows_MDK[place.mini_batch][place.rank][place.micro_batch]
            assert row.places[LOG_PROB] == Place(0, place.rank, row.places[LOG_PROB].micro_batch)


def test_a_file_that_cannot_be_written_ends_no_step(monkeypatch, tmp_path, caplog):
    (tmp_path / "steps").touch()
    trained_step(monkeypatch, "padding.record=true", f"trainer.default_local_dir={tmp_path}")
    assert f"{tmp_path / 'steps' / '7.jsonl'} cannot be written" in caplog.text


def test_the_files_are_beside_the_rollouts_if_there_are_any(monkeypatch, tmp_path):
    rollouts = f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"
    trained_step(
        monkeypatch,
        "padding.record=true",
        rollouts,
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
    )
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["7.jsonl"]
