"""Zero effect on real actors: two padded ranks end with the weights of one rank that never saw a
pad.

test_engine_shapes.py has other shapes: four ranks, Ulysses, critics, adapters, experts.
"""

import numpy as np
import pytest
import torch

from tests.support.engine_shapes import Shape, started
from tests.support.fsdp2_workers import moments_of, start_over
from tests.support.padded_rows import upsample
from tests.support.rows_in_queue import put_columns, read_columns
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_METRIC
from tests.support.trained_batches import (
    put_branching_rows,
    put_copies,
    put_full_rows,
    put_trained_rows,
    put_weights,
)
from tests.support.updates import (
    EPOCHS,
    TEMPLATE,
    assert_metrics_agree,
    assert_updates_agree,
    plan_of,
    update_both,
)
from verl_padding.pads.loss_weighting import LossWeighting

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]


@pytest.fixture(scope="module")
def actors(model_of, one_rank_of):
    """Two ranks that get pads, and one that does not."""
    with started(Shape(), model_of(Shape())) as padded_ranks:
        yield padded_ranks, one_rank_of(Shape())


UPDATES = {
    "two rows": {"packer": "plan", "micro_batch_rows": 2},
    "verl's packer and number of rows": {"packer": "verl", "strategy": "lcm", "mini_batch": 4},
    "tries": {"packer": "plan", "sharing": "on", "mode": "seq-mean-token-mean"},
}
"""Arguments of :func:`assert_updates_agree`; test_engine_shapes.py has those of other shapes."""


@pytest.mark.parametrize("how", UPDATES.values(), ids=UPDATES)
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(how, actors):
    assert_updates_agree(*actors, **how)


def test_so_do_ranks_with_pads_in_micro_batches_of_their_own(actors):
    layout = assert_updates_agree(*actors, "plan", put=put_full_rows).layout
    held = [rows for step in layout.rows_MDK for rows_K in step for rows in rows_K]
    assert any(min(rows) >= layout.n_rows for rows in held)


def test_steps_and_ranks_without_a_trained_token_leave_the_others_alone(actors):
    """All rows of the first of three mini-batches, and all that one rank has of the second, are
    masked."""
    start_over(actors, "seq-mean-token-mean")
    batch = put_trained_rows()
    plan = plan_of(batch, "plan")
    first, second, _ = plan.layouts["actor"].local_batches
    masked = {row for local_batch in (*first, second[0]) for row in local_batch}
    responses = [tag["response_len"] for tag in batch.tags]
    masks = [torch.full((length,), int(row not in masked)) for row, length in enumerate(responses)]
    put_columns(batch, response_mask=masks, loss_mask=masks)
    both = update_both(*actors, batch, plan)
    steps = len(both.plain)
    assert (steps, len(both.padded["grad_norm"])) == (3 * EPOCHS, 3 * EPOCHS), (
        "the configured steps"
    )
    assert_metrics_agree(both, names=("grad_norm", "loss"))
    for name in ("grad_norm", "loss"):
        assert [step[name][0] == 0 for step in both.plain] == [True, False, False] * EPOCHS
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        plain = [step[name][0] for step in both.plain]
        trained = [value for step, value in enumerate(plain) if step % 3 > 0]
        np.testing.assert_allclose(
            both.padded[name], trained, rtol=RELATIVE_METRIC, atol=5e-7, err_msg=name
        )
    assert both.padded["actor/pg_loss"][-3] == 0, "the losses are known by the second epoch"


@pytest.mark.parametrize("weighs", [True, False], ids=["weights", "tries"])
def test_ranks_without_zero_advantage_rows_end_with_the_weights_of_all_rows(weighs, actors):
    """Of three mini-batches, one keeps most rows, one has zero-advantage rows alone."""
    mode, sharing = "seq-mean-token-mean", "off" if weighs else "on"
    start_over(actors, mode, terms=False)
    batch = put_trained_rows() if weighs else put_branching_rows()
    rows_M = plan_of(batch, "plan", sharing=sharing).layouts["actor"].rows_M
    zero_advantage = sorted({*rows_M[0][:1], *rows_M[1], *rows_M[2][:-2]})
    [advantages] = read_columns(batch, "advantages")
    put_columns(
        batch, advantages=[a * (row not in zero_advantage) for row, a in enumerate(advantages)]
    )
    copies = put_copies(batch) if weighs else None
    if weighs:
        put_weights(batch)
    plan = plan_of(batch, "plan", zero_advantage=zero_advantage, sharing=sharing)
    dropped = [len(rows) for rows in plan.layouts["actor"].dropped]
    assert dropped == [1, len(rows_M[1]) - 1, len(rows_M[2]) - 2]
    padded = upsample(batch, plan, TEMPLATE, weighting=LossWeighting(mode=mode))
    both = update_both(
        *actors, batch, plan, said={"calculate_entropy": False}, padded=padded, copies=copies
    )
    assert len(both.padded["grad_norm"]) == 3 * EPOCHS
    assert [norm == 0 for norm in both.padded["grad_norm"][:3]] == [False, True, False]
    if not weighs:
        assert_metrics_agree(both, names=("actor/pg_loss", "grad_norm"))
    assert "actor/ppo_kl" not in both.padded
    assert len(both.padded["actor/ppo_kl_computed"]) == 3 * EPOCHS
    moments, want = map(moments_of, actors)
    assert (moments - want).norm() <= RELATIVE_FLOAT32 * want.norm()
