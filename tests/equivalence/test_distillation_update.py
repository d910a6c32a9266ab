"""Zero effect on distillation: two padded ranks end with the weights of one rank that never saw a pad.

verl's engine asks a top-k loss for its values token by token, pads and all, before the loss sums them up.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import BUDGET, assert_metrics_agree, plan_of, put_trained_rows, update_both
from tests.support.fsdp2_workers import padded_and_plain, start_actor
from tests.support.rows_in_queue import put_columns
from tests.support.tolerance import ADAM_EPS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

TOP_K = 5


@pytest.fixture(scope="module")
def distilling(transfer_queue, qwen2) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    overrides = (
        f"+actor_rollout_ref.actor.optim.{ADAM_EPS}",
        "distillation.enabled=true",
        "distillation.n_gpus_per_node=2",
        "distillation.nnodes=1",
        "distillation.teacher_models.teacher_model.inference.name=vllm",  # is not started here
        f"distillation.teacher_models.teacher_model.model_path={qwen2}",
        "distillation.teacher_models.teacher_model.num_replicas=1",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        f"distillation.distillation_loss.topk={TOP_K}",
        "distillation.distillation_loss.use_policy_gradient=false",
    )
    budget = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}"
    with padded_and_plain(start_actor, qwen2, *overrides, padded=[budget]) as both:
        yield both


def put_taught_rows():
    """Rows with a teacher's most likely tokens at each place."""
    batch, draw = put_trained_rows(), torch.Generator().manual_seed(3)
    lengths = [tag["seq_len"] for tag in batch.tags]
    log_probs = [torch.randn(length, 256, generator=draw).log_softmax(-1).topk(TOP_K) for length in lengths]
    columns = {"teacher_logprobs": [top.values for top in log_probs], "teacher_ids": [top.indices for top in log_probs]}
    return put_columns(batch, **columns)


def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(distilling):
    batch = put_taught_rows()
    both = update_both(*distilling, batch, plan_of(batch, "verl"), said={"distillation_use_topk": True})
    names = ("distillation/loss", "actor/pg_loss", "grad_norm", "distillation/student_mass")
    assert_metrics_agree(both, names=names)
    assert min(np.ravel(step["distillation/loss"])[0] for step in both.plain) > 0
