"""Prefixes that are computed once: two ranks that share end with the weights of one rank without pads or sharing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence import updates
from tests.equivalence.test_lora_update import adapter_settings, make_adapter
from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGETS_OF_CRITICS,
    CRITIC_TERMS,
    MODES,
    TEMPLATE,
    assert_metrics_agree,
    assert_packed_as_planned,
    call,
    update_both,
    with_trained_fields,
)
from tests.support.fsdp2_workers import (
    give_budget,
    make_value_model,
    padded_and_plain,
    start_actor,
    start_critic,
    start_over,
)
from tests.support.padded_rows import upsample
from tests.support.sessions_that_grow import grown_sessions, put_grown_sessions
from tests.support.tolerance import RELATIVE_FLOAT32
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.lineage import find_extensions
from verl_padding.pads.upsampling import strip
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Sharing, Update, plan_batch
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

TURNS = [3, 2, 5, 4, 5, 2, 1, 3, 1, 2, 3, 2]
PROMPTS = 6

BUDGET = 48
BUDGETS = (
    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}",
    f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={BUDGET}",
)
SHARE = install("chains")


@pytest.fixture(scope="module")
def sharing_and_plain(actors) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    give_budget(actors[0], BUDGET)
    yield actors
    give_budget(actors[0], updates.BUDGET)


def batch_and_plan(update: str = "actor", strategy: str = "prompt", sharing: Sharing = "chains", **shape: Any) -> tuple:
    torch.manual_seed(0)
    batch = with_trained_fields(put_grown_sessions(grown_sessions(TURNS, prompts=PROMPTS)))
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    extends_R = find_extensions(batch, tokens_R)
    assert sum(earlier is not None for earlier in extends_R) == sum(TURNS) - len(TURNS)
    call_shape = {"dp_size": 2, "token_budget": BUDGET} | shape
    job = Job(
        strategy=strategy,
        prompts=PROMPTS,
        sessions_per_prompt=2,
        updates={update: Update(**call_shape, prompts_per_mini_batch=2)},
        inference={"log_prob": Pass(**call_shape, as_update=update)},
        packer="plan",
        sharing=sharing,
    )
    return batch, plan_batch(Rows.from_keys(batch.keys, tokens_R, extends_R), job)


def assert_shared(plan: BatchPlan, call_name: str) -> None:
    figures = plan.figures[call_name]
    assert figures.sharing_factor > 1.4
    assert figures.pads > 0


def assert_sharing_agrees(
    sharing: RayWorkerGroup, one_rank: RayWorkerGroup, batch: KVBatchMeta, plan: BatchPlan, update: str = "actor"
) -> None:
    """Of ranks that have just started, or started over."""
    sharing.execute_with_func_generator(SHARE)
    if plan.sharing == "chains":
        assert_shared(plan, update)
    both = update_both(sharing, one_rank, batch, plan, update=update)
    assert_metrics_agree(both, update)
    assert_packed_as_planned(both, update)


@pytest.mark.parametrize(
    "strategy", ["prompt", *(pytest.param(other, marks=pytest.mark.slow) for other in ("rows", "lcm"))]
)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_that_share_end_with_the_weights_of_one_rank_that_does_not(mode, strategy, sharing_and_plain):
    for workers in sharing_and_plain:
        start_over(workers, mode)
    assert_sharing_agrees(*sharing_and_plain, *batch_and_plan(strategy=strategy))


def test_log_probs_and_entropy_are_those_of_every_row_by_itself(sharing_and_plain):
    sharing, one_rank = sharing_and_plain
    sharing.execute_with_func_generator(SHARE)
    for workers in sharing_and_plain:
        start_over(workers, "token-mean")
    batch, plan = batch_and_plan()
    assert_shared(plan, "log_prob")
    padded = upsample(batch, plan, TEMPLATE)
    group = PaddedWorkerGroup(sharing, lambda: padded)
    names = {"calculate_entropy": True, "calculate_sum_pi_squared": True, "compute_loss": False}
    got = read(group.compute_log_prob(call(batch, batch.keys, **names)))
    strip(padded.pads)
    want = read(one_rank.compute_log_prob(call(batch, batch.keys, **names)))
    assert set(got) == set(want) >= {"log_probs", "entropy"}
    for name in want:
        for row, (a, b, tag) in enumerate(zip(got[name], want[name], batch.tags, strict=True)):
            last = tag["seq_len"] - 1  # of no label
            torch.testing.assert_close(a[:last], b[:last], rtol=RELATIVE_FLOAT32, atol=1e-6, msg=f"{name} of row {row}")


def read(output) -> dict[str, list[torch.Tensor]]:
    names = [name for name in ("log_probs", "entropy", "sum_pi_squared") if name in output.fields]
    rows = tq.kv_batch_get(keys=output.keys, partition_id=output.partition_id, select_fields=names)
    return {name: [row.clone() for row in rows[name].unbind()] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_so_do_four_ranks(mode, sharing_and_plain, four_ranks):
    _, one_rank = sharing_and_plain
    give_budget(four_ranks, BUDGET)
    for workers in (four_ranks, one_rank):
        start_over(workers, mode)
    assert_sharing_agrees(four_ranks, one_rank, *batch_and_plan(dp_size=4))


@pytest.mark.slow
def test_so_does_a_critic(qwen2, tmp_path):
    model = make_value_model(qwen2, tmp_path)
    with padded_and_plain(start_critic, model, *CRITIC_TERMS, **BUDGETS_OF_CRITICS) as both:
        assert_sharing_agrees(*both, *batch_and_plan("critic", token_budget=updates.BUDGET), "critic")


@pytest.mark.slow
def test_so_do_adapters(qwen2, tmp_path):
    adapter = adapter_settings(make_adapter(qwen2, tmp_path))
    with padded_and_plain(start_actor, qwen2, *ALL_TERMS, *adapter, padded=BUDGETS) as both:
        assert_sharing_agrees(*both, *batch_and_plan())


@pytest.mark.slow
def test_so_do_experts(transfer_queue, tmp_path):
    model = make_tiny_model("qwen3_moe", tmp_path)
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=BUDGETS) as both:
        assert_sharing_agrees(*both, *batch_and_plan())
