"""Two groups of two ranks that share rows (Ulysses) end with the weights of one rank without pads."""

from collections.abc import Iterator

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.test_shared_prefixes import assert_sharing_agrees, batch_and_plan
from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGET,
    BUDGETS,
    BUDGETS_OF_CRITICS,
    CRITIC_TERMS,
    CUTS,
    EACH_CUT,
    MODES,
    assert_updates_agree,
)
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_actor, start_critic, start_over
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

SHARING_RANKS = 2
ULYSSES = f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={SHARING_RANKS}"


@pytest.fixture(scope="module")
def ranks_that_share_rows(transfer_queue, qwen2) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    with padded_and_plain(start_actor, qwen2, *ALL_TERMS, padded=[*BUDGETS, ULYSSES], ranks=2 * SHARING_RANKS) as both:
        yield both


@EACH_CUT
def test_ranks_that_share_rows_end_with_the_weights_of_one_rank(cut, ranks_that_share_rows):
    assert_updates_agree(*ranks_that_share_rows, **cut, ranks_of_row=SHARING_RANKS)


@pytest.mark.parametrize("sharing", ["off", "chains"])
@pytest.mark.parametrize("mode", MODES)
def test_so_do_they_with_and_without_shared_prefixes(mode, sharing, ranks_that_share_rows):
    for workers in ranks_that_share_rows:
        start_over(workers, mode)
    batch, plan = batch_and_plan(sharing=sharing, token_budget=SHARING_RANKS * BUDGET)
    assert_sharing_agrees(*ranks_that_share_rows, batch, plan)


def test_so_do_ranks_with_a_mixture_of_experts(transfer_queue, tmp_path):
    assert_agree(start_actor, make_tiny_model("qwen3_moe", tmp_path), *ALL_TERMS, padded=[*BUDGETS, ULYSSES])


def test_so_do_critics(qwen2, transfer_queue, tmp_path):
    ulysses = f"critic.fsdp.ulysses_sequence_parallel_size={SHARING_RANKS}"
    budgets = BUDGETS_OF_CRITICS | {"padded": [*BUDGETS_OF_CRITICS["padded"], ulysses]}
    assert_agree(start_critic, make_value_model(qwen2, tmp_path), *CRITIC_TERMS, **budgets, update="critic")


def assert_agree(start, model, *overrides, update="actor", **of_sides):
    with padded_and_plain(start, model, *overrides, **of_sides, ranks=2 * SHARING_RANKS) as both:
        for cut in CUTS.values():
            assert_updates_agree(*both, **cut, update=update, ranks_of_row=SHARING_RANKS)
        for workers in both:
            start_over(workers, "token-mean")
        batch, plan = batch_and_plan(update, token_budget=SHARING_RANKS * BUDGET)
        assert_sharing_agrees(*both, batch, plan, update)
