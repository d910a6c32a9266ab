"""Zero effect on each engine in each shape: padded ranks end with the weights of one rank that
never saw a pad."""

import numpy as np
import pytest
import torch

from tests.support.engine_shapes import SHAPES, Shape, started
from tests.support.fsdp2_workers import start_over
from tests.support.rows_in_queue import put_columns
from tests.support.trained_batches import put_trained_rows
from tests.support.updates import (
    EACH_CUT,
    assert_metrics_agree,
    assert_updates_agree,
    plan_of,
    update_both,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(shape, marks=shape.marks, id=name) for name, shape in SHAPES.items()],
)
def shape_and_both(request, model_of, one_rank_of):
    """A shape, its padded ranks, and one rank that does not see a pad."""
    shape = request.param
    with started(shape, model_of(shape)) as padded_ranks:
        yield shape, padded_ranks, one_rank_of(shape)


@EACH_CUT
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(cut, shape_and_both):
    shape, *both = shape_and_both
    if cut not in shape.cuts:
        pytest.skip("its ranks share every row")
    assert_updates_agree(*both, **cut, **shape.planned, update=shape.update)


def test_rows_that_are_padded_to_the_longest_train_as_packed_ones(model_of, one_rank_of):
    shape = Shape()
    with started(
        shape, model_of(shape), "actor_rollout_ref.model.use_remove_padding=false"
    ) as padded_ranks:
        both = padded_ranks, one_rank_of(shape)
        start_over(both, "token-mean")
        batch = put_trained_rows()
        assert_metrics_agree(
            update_both(*both, batch, plan_of(batch, "plan", padded_to="micro_batch"))
        )


TOP_K = 5


def test_ranks_that_distill_end_with_the_weights_of_one_rank_without_pads(transfer_queue, model_of):
    """verl's engine asks a top-k loss for its values token by token, pads and all, before the loss
    sums them up."""
    shape, teacher = Shape(), "distillation.teacher_models.teacher_model"
    distilling = (
        "distillation.enabled=true",
        "distillation.n_gpus_per_node=2",
        "distillation.nnodes=1",
        f"{teacher}.inference.name=vllm",  # is not started here
        f"{teacher}.model_path={model_of(shape)}",
        f"{teacher}.num_replicas=1",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        f"distillation.distillation_loss.topk={TOP_K}",
        "distillation.distillation_loss.use_policy_gradient=false",
    )
    batch, draw = put_trained_rows(), torch.Generator().manual_seed(3)
    lengths = [tag["seq_len"] for tag in batch.tags]
    top = [
        torch.randn(length, 256, generator=draw).log_softmax(-1).topk(TOP_K) for length in lengths
    ]
    columns = {
        "teacher_logprobs": [row.values for row in top],
        "teacher_ids": [row.indices for row in top],
    }
    batch, model = put_columns(batch, **columns), model_of(shape)
    with (
        started(shape, model, *distilling) as padded_ranks,
        started(shape.reference, model, *distilling) as one_rank,
    ):
        said = {"distillation_use_topk": True}
        both = update_both(padded_ranks, one_rank, batch, plan_of(batch, "verl"), said=said)
    names = ("distillation/loss", "actor/pg_loss", "grad_norm", "distillation/student_mass")
    assert_metrics_agree(both, names=names)
    assert min(np.ravel(step["distillation/loss"])[0] for step in both.plain) > 0
