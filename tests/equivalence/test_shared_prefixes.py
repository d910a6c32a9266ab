"""Prefixes that are computed once: two ranks that share end with the weights of one rank without pads or sharing.

test_engine_shapes.py has the other shapes of FSDP2: four ranks, Ulysses, critics, adapters, experts.
"""

from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import (
    BUDGET,
    MODES,
    assert_metrics_agree,
    assert_packed_as_planned,
    update_both,
    with_trained_fields,
)
from tests.support.fsdp2_workers import start_over
from tests.support.sessions_that_grow import grown_sessions, put_grown_sessions
from verl_padding.pads.lineage import find_extensions
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Sharing, Update, plan_batch
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

TURNS = [3, 2, 5, 4, 5, 2, 1, 3, 1, 2, 3, 2]
"""Rows of each session; two sessions of each of six prompts."""


def batch_and_plan(
    update: str = "actor", strategy: str = "prompt", sharing: Sharing = "chains", **shape: Any
) -> tuple[KVBatchMeta, BatchPlan]:
    torch.manual_seed(0)
    batch = with_trained_fields(put_grown_sessions(grown_sessions(TURNS, prompts=len(TURNS) // 2)))
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    extends_R = find_extensions(batch, tokens_R)
    assert sum(earlier is not None for earlier in extends_R) == sum(TURNS) - len(TURNS)
    call_shape = {"dp_size": 2, "token_budget": BUDGET} | shape
    job = Job(
        strategy=strategy,
        prompts=len(TURNS) // 2,
        sessions_per_prompt=2,
        updates={update: Update(**call_shape, prompts_per_mini_batch=2)},
        inference={"log_prob": Pass(**call_shape, as_update=update)},
        packer="plan",
        sharing=sharing,
    )
    plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, extends_R), job)
    assert plan.figures[update].pads > 0
    assert plan.figures[update].sharing_factor > 1.4 or sharing == "off"
    return batch, plan


def assert_sharing_agrees(
    sharing: RayWorkerGroup, one_rank: RayWorkerGroup, batch: KVBatchMeta, plan: BatchPlan, update: str = "actor"
) -> None:
    """Of ranks that have just started, or started over."""
    sharing.execute_with_func_generator(install("chains"))
    both = update_both(sharing, one_rank, batch, plan, update=update)
    assert_metrics_agree(both, update)
    assert_packed_as_planned(both, update)


@pytest.mark.parametrize(
    "strategy", ["prompt", *(pytest.param(other, marks=pytest.mark.slow) for other in ("rows", "lcm"))]
)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_that_share_end_with_the_weights_of_one_rank_that_does_not(mode, strategy, actors):
    for workers in actors:
        start_over(workers, mode)
    assert_sharing_agrees(*actors, *batch_and_plan(strategy=strategy))
