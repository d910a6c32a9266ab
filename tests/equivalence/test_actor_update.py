"""Zero effect on real actors: two padded ranks end with the weights of one rank that never saw a pad."""

import os

import numpy as np
import pytest
import torch
from verl.protocol import DataProto

from tests.equivalence.test_shared_prefixes import batch_and_plan
from tests.equivalence.updates import (
    EPOCHS,
    MODES,
    PACKERS,
    TEMPLATE,
    assert_metrics_agree,
    assert_updates_agree,
    call,
    plan_of,
    put_trained_rows,
    update_both,
)
from tests.support.fsdp2_workers import follow_no_plan, start_over
from tests.support.padded_rows import upsample
from tests.support.rows_in_queue import put_columns, read_columns
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_METRIC
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.upsampling import strip
from verl_padding.worker.losses import MICRO_BATCHES
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]


EACH_PACKER = pytest.mark.parametrize("packer", PACKERS)


@EACH_PACKER
@pytest.mark.parametrize("mode", MODES)
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, packer, actors):
    both = assert_updates_agree(*actors, packer, mode=mode)
    micro_batches = both.padded[MICRO_BATCHES]
    assert len(micro_batches) == EPOCHS * both.layout.n_mini_batches
    assert max(micro_batches) > 1 or packer == "verl"


def test_so_do_ranks_with_another_policy_loss(actors):
    for workers in actors:
        start_over(workers, "seq-mean-token-mean", policy_loss="gspo")
    batch = put_trained_rows()
    assert_metrics_agree(update_both(*actors, batch, plan_of(batch, "verl")))


@EACH_PACKER
def test_so_do_ranks_with_micro_batches_of_fixed_size(packer, actors):
    assert_updates_agree(*actors, packer, mode="token-mean", micro_batch_rows=2)


@EACH_PACKER
def test_steps_and_ranks_without_a_trained_token_leave_the_others_as_one_rank_has_them(packer, actors):
    """All rows of the first of three mini-batches, and all that one rank has of the second, are masked."""
    for workers in actors:
        start_over(workers, "seq-mean-token-mean")
    follow(actors[0], packer)
    batch = put_trained_rows()
    plan = plan_of(batch, packer)
    first, second, _ = plan.layouts["actor"].cells
    masked = {row for cell in (*first, second[0]) for row in cell}
    responses = [tag["response_len"] for tag in batch.tags]
    masks = [torch.full((length,), int(row not in masked)) for row, length in enumerate(responses)]
    put_columns(batch, response_mask=masks, loss_mask=masks)
    both = update_both(*actors, batch, plan)
    steps = len(both.plain)
    assert (steps, len(both.padded["grad_norm"])) == (3 * EPOCHS, 3 * EPOCHS), "the configured steps"
    assert_metrics_agree(both, names=("grad_norm", "loss"))
    for name in ("grad_norm", "loss"):
        assert [step[name][0] == 0 for step in both.plain] == [True, False, False] * EPOCHS
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        plain = [step[name][0] for step in both.plain]
        trained = [value for step, value in enumerate(plain) if step % 3 > 0]
        np.testing.assert_allclose(both.padded[name], trained, rtol=RELATIVE_METRIC, atol=5e-7, err_msg=name)
    assert both.padded["actor/pg_loss"][-3] == 0, "the losses are known by the second epoch"


def follow(padded_ranks, packer):
    padded_ranks.execute_with_func_generator(install() if packer == "plan" else follow_no_plan)


def hold_half_a_gib_for_a_moment(worker):
    torch.ones(2**29, dtype=torch.uint8).sum()
    return DataProto()


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system's peaks cannot be reset")
def test_the_peak_memory_of_an_update_is_its_own_and_not_that_of_the_process(actors):
    padded_ranks, _ = actors
    start_over(padded_ranks, "token-mean")
    batch = put_trained_rows()
    padded = upsample(batch, plan_of(batch, "verl"), TEMPLATE)
    group = PaddedWorkerGroup(padded_ranks, lambda: padded)

    def peak_gib(update) -> float:
        rows = call(batch, batch.keys, global_batch_size=7, mini_batch_size=4, epochs=1)
        return max(update(rows)["metrics"]["perf/max_memory_allocated_gb"])

    def update_as_verl(rows):
        return padded_ranks.update_actor(padded.update_call("actor", rows))

    own = peak_gib(group.update_actor)
    padded_ranks.execute_with_func_generator(hold_half_a_gib_for_a_moment)
    assert peak_gib(update_as_verl) > own + 0.4, "verl tells the highest since the process began"
    assert peak_gib(group.update_actor) < own + 0.1
    strip(padded.pads)


@pytest.mark.parametrize("cut", [*PACKERS, "shared prefixes"])
def test_log_probs_come_back_in_row_order_whoever_cuts_the_micro_batches(cut, actors):
    padded_ranks, one_rank = actors
    for workers in actors:
        start_over(workers, "token-mean")
    if cut == "shared prefixes":
        padded_ranks.execute_with_func_generator(install("chains"))
        batch, plan = batch_and_plan()
    else:
        follow(padded_ranks, cut)
        batch = put_trained_rows()
        plan = plan_of(batch, cut)
    assert plan.layouts["log_prob"].n_pads > 0

    def outputs_of(workers) -> list[torch.Tensor]:
        asked = {"calculate_entropy": True, "compute_loss": False}
        assert workers.compute_log_prob(call(batch, batch.keys, **asked)).keys == batch.keys
        # The last position of a row predicts the first token of whatever row is packed behind it.
        return [row[:-1] for column in read_columns(batch, "log_probs", "entropy") for row in column]

    want = outputs_of(one_rank)
    padded = upsample(batch, plan, TEMPLATE)
    got = outputs_of(PaddedWorkerGroup(padded_ranks, lambda: padded))
    strip(padded.pads)
    assert len({len(row) for row in want}) > 5
    for row_got, row_want in zip(got, want, strict=True):
        torch.testing.assert_close(row_got, row_want, rtol=RELATIVE_FLOAT32, atol=1e-5)
