"""Rows of a batch in TransferQueue without an advantage, which the actor's update leaves out."""

import pytest
import torch

from tests.driver.test_worker_calls import Workers, trainer_with
from tests.support.rows_in_queue import put_columns, put_rows, queue_content, read_columns
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.driver.training_steps import TrainingSteps
from verl_padding.errors import PaddingConfigError
from verl_padding.pads.planned_call import CALL
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

SKIP = "padding.zero_advantage_rows=skip"
# Prompt a: both sessions earn 1. b: 0 and 1, and the second session ends with a row that is not
# trained. c: both earn 0, and one has a row without a trained token. d: 0 and 0.5.
ROWS = {
    "a_0_0": ([1, 1, 1], 1.0),
    "a_0_1": ([1], 1.0),
    "a_1_0": ([1, 1], 1.0),
    "b_0_0": ([1, 1], 0.0),
    "b_1_0": ([0, 1], 1.0),
    "b_1_1": ([0, 0], 1.0),
    "c_0_0": ([1, 1, 1, 1], 0.0),
    "c_1_0": ([1], 0.0),
    "c_1_1": ([0], 0.0),
    "d_0_0": ([1, 0], 0.0),
    "d_1_0": ([1], 0.5),
}
ONE_STEP = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.calculate_log_probs=false",
    "algorithm.rollout_correction=null",
)
IDLE = {"a_0_0", "a_0_1", "a_1_0", "b_1_1", "c_0_0", "c_1_0", "c_1_1"}


@pytest.fixture
def workers(empty_queue):
    return Workers()


def put(*, old_log_probs=True):
    scores = [torch.zeros(len(mask)) for mask, _ in ROWS.values()]
    for row, (_, score) in zip(scores, ROWS.values(), strict=True):
        row[-1] = score
    masks = [torch.tensor(mask) for mask, _ in ROWS.values()]
    old = [torch.zeros(len(mask)) for mask in masks]
    lengths, fields = (
        [(4, len(mask)) for mask in masks],
        {"rm_scores": scores} | ({"old_log_probs": old} if old_log_probs else {}),
    )
    return put_rows(lengths, list(ROWS), **fields, response_mask=masks, loss_mask=masks)


def real_keys(sent):
    return [key for key in sent.keys if not key.startswith("pad")]


def test_an_update_gets_the_rows_that_have_an_advantage(workers):
    trainer, group = trainer_with(workers, SKIP)
    batch, metrics = put(), {}
    trainer._balance_batch(batch, metrics)
    trainer._compute_advantage(batch, metrics)
    group.compute_log_prob(batch)
    group.update_actor(batch)
    passed, updated = workers.sent
    # Mini-batches of two prompts: a, b and c, d.
    assert [
        {batch.keys[row] for row in rows} & IDLE
        for rows in trainer.steps.current.plan.layouts["actor"].dropped
    ] == [{key for key in IDLE if key[0] in prompts} for prompts in ("ab", "cd")]
    assert sorted(real_keys(passed)) == sorted(ROWS)
    assert sorted(real_keys(updated)) == sorted(ROWS.keys() - IDLE)
    assert not passed.extra_info[CALL].mini_batches
    # Tokens of prompts a and b: 3 + 1 + 2 + 2 + 1; of c and d: 4 + 1 + 1 + 1.
    assert [
        (step.all_loss_tokens, step.rows_with_loss)
        for step in updated.extra_info[CALL].mini_batches
    ] == [(9, 5), (7, 4)]


def test_a_step_without_advantages_computes_its_shortest_trained_row(workers):
    trainer, group = trainer_with(workers, SKIP)
    batch = put()
    put_columns(batch, rm_scores=[torch.zeros(len(mask)) for mask, _ in ROWS.values()])
    trainer._balance_batch(batch, {})
    trainer._compute_advantage(batch, {})
    group.update_actor(batch)
    assert sorted(real_keys(workers.sent[0])) == ["a_0_1", "c_1_0"]
    assert len(workers.sent[0].extra_info[CALL].mini_batches) == 2


def test_the_update_is_planned_by_the_advantages_at_its_call(workers):
    trainer, group = trainer_with(workers, SKIP, *ONE_STEP)
    batch = put()
    trainer._balance_batch(batch, {})
    trainer._compute_advantage(batch, {})
    content = queue_content()
    for changed in (
        "c_1_0",
        "a_0_1",
    ):  # as a trainer of one's own may change them, also between two updates
        [advantages] = read_columns(batch, "advantages")
        advantages[list(ROWS).index(changed)][0] = 1e-30
        put_columns(batch, advantages=advantages)
        group.update_actor(batch)
        sent, metrics = workers.sent[-1], trainer.steps.current.metrics()
        assert changed in real_keys(sent)
        dropped = len(ROWS) - len(real_keys(sent))
        assert metrics["padding/actor/left_out_rows/total"] == dropped
    assert dropped == len(IDLE) - 2
    put_columns(batch, advantages=[torch.ones(len(mask)) for mask, _ in ROWS.values()])
    put_columns(
        batch, response_mask=[torch.ones(len(mask), dtype=torch.int64) for mask, _ in ROWS.values()]
    )
    group.update_actor(batch)
    assert sorted(real_keys(workers.sent[-1])) == sorted(ROWS), "none is left out any more"
    assert trainer.steps.current.metrics()["padding/actor/left_out_rows/total"] == 0
    strip(trainer.steps.current.pads)
    assert queue_content().keys() == set(ROWS) < content.keys()


@pytest.mark.parametrize("recompute", ["false", "auto"])
def test_an_update_takes_its_own_log_probs_where_there_are_no_others(recompute, workers):
    setting = f"padding.recompute_old_log_probs={recompute}"
    trainer, group = trainer_with(workers, setting, *ONE_STEP)
    batch = put(old_log_probs=False)
    trainer._balance_batch(batch, {})
    trainer._compute_advantage(batch, {})
    group.update_actor(batch)
    assert workers.sent[-1].extra_info[CALL].takes_own_log_probs
    with pytest.raises(PaddingConfigError, match=r"^padding.recompute_old_log_probs="):
        group.update_actor(batch)
    # As a trainer of one's own may write them, in a method that it adds.
    put_columns(batch, old_log_probs=[torch.zeros(len(mask)) for mask, _ in ROWS.values()])
    for _ in range(2):
        group.update_actor(batch)
        assert not workers.sent[-1].extra_info[CALL].takes_own_log_probs
    strip(trainer.steps.current.pads)


@pytest.mark.parametrize("method", ["_compute_old_log_prob", "_update_actor", "_step_once"])
def test_a_trainer_that_updates_in_its_own_way_keeps_the_pass(method):
    trainer = padded_trainer("padding.recompute_old_log_probs=auto", *ONE_STEP)
    assert trainer._job.skips_old_log_probs
    own = {method: lambda self, *args: None, "__module__": "mine"}
    trainer.__class__ = type("Own", (type(trainer),), own)
    TrainingSteps(trainer, trainer._job)
    assert not trainer._job.skips_old_log_probs
    trainer = padded_trainer("padding.recompute_old_log_probs=false", *ONE_STEP)
    trainer.__class__ = type("Own", (type(trainer),), own)
    with pytest.raises(PaddingConfigError, match=rf"recompute_old_log_probs=False: Own\.{method}"):
        TrainingSteps(trainer, trainer._job)


def test_rollout_log_probs_that_verl_would_compare_are_refused(workers):
    trainer, _ = trainer_with(workers, "padding.recompute_old_log_probs=false", *ONE_STEP[:2])
    content = queue_content()
    with pytest.raises(PaddingConfigError, match=r"rollout_log_probs: .*rollout_correction=null"):
        trainer._balance_batch(put(), {})
    assert queue_content().keys() - content.keys() == set(ROWS)


def test_with_auto_such_rows_keep_the_pass_and_are_planned_with_it(workers):
    trainer, _ = trainer_with(workers, "padding.recompute_old_log_probs=auto", *ONE_STEP[:2])
    assert trainer._job.skips_old_log_probs
    trainer._balance_batch(put(), {})
    assert not trainer._job.skips_old_log_probs
    assert "log_prob" in trainer.steps.current.plan.layouts
