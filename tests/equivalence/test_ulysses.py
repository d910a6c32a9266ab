"""Two groups of two ranks that share rows (Ulysses) end with the weights of one rank without pads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.test_shared_prefixes import (
    BUDGET,
    BUDGETS,
    SHARE,
    TEMPLATE,
    assert_metrics_agree,
    assert_shared,
    batch_and_plan,
)
from tests.equivalence.updates import ALL_TERMS, assert_packed_as_planned, update_both_with
from tests.support.fsdp2_workers import padded_and_plain, start_actor, start_over
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

SHARING_RANKS = 2
ULYSSES = f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={SHARING_RANKS}"


@pytest.fixture(scope="module")
def actors(transfer_queue, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    model: Path = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=[*BUDGETS, ULYSSES], ranks=2 * SHARING_RANKS) as both:
        both[0].execute_with_func_generator(SHARE)
        yield both


@pytest.mark.parametrize("sharing", ["off", "chains"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_ranks_that_share_rows_end_with_the_weights_of_one_rank(mode, sharing, actors):
    for workers in actors:
        start_over(workers, mode)
    batch, plan = batch_and_plan(sharing=sharing, token_budget=SHARING_RANKS * BUDGET)
    if sharing == "chains":
        assert_shared(plan, "actor")
    assert plan.n_pads > 0
    both = update_both_with(*actors, batch, plan, TEMPLATE)
    assert_metrics_agree(both)
    assert_packed_as_planned(both)
