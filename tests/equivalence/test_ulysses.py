"""Two groups of two ranks that share rows (Ulysses) end with the weights of one rank without pads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence import updates
from tests.equivalence.test_actor_update import assert_metrics_agree
from tests.equivalence.test_critic_update import (
    assert_critic_metrics_agree,
    assert_critics_agree,
    assert_critics_agree_where_some_hold_pads_alone,
)
from tests.equivalence.test_shared_prefixes import (
    BUDGET,
    BUDGETS,
    SHARE,
    TEMPLATE,
    assert_shared,
    batch_and_plan,
)
from tests.equivalence.updates import (
    ALL_TERMS,
    CUTS,
    PACKERS,
    assert_cut_as_told,
    assert_packed_as_planned,
    plan_of_few,
    put_few_rows,
    update_both,
    update_both_with,
)
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_actor, start_critic, start_over
from tests.support.tolerance import ADAM_EPS
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


@pytest.mark.parametrize(("micro_batch_rows", "packer"), [(None, "verl"), (2, "verl"), (2, "plan")])
def test_so_do_they_however_micro_batches_are_cut(micro_batch_rows, packer, actors):
    assert_agree(*actors, "token-mean", micro_batch_rows, packer)


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_they_where_one_group_holds_pads_alone(packer, actors):
    assert_agree_where_one_group_holds_pads_alone(*actors, packer)


def assert_agree(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, mode: str, micro_batch_rows: int | None, packer: str
) -> None:
    start_over(one_rank, mode)
    start_over(padded_ranks, mode, micro_batch_rows)
    sizes = {"micro_batch_rows": micro_batch_rows, "ranks_of_row": SHARING_RANKS}
    both = update_both(padded_ranks, one_rank, packer=packer, **sizes)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer, micro_batch_rows)


def assert_agree_where_one_group_holds_pads_alone(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, packer: str
) -> None:
    for workers in (padded_ranks, one_rank):
        start_over(workers, "seq-mean-token-mean")
    batch = put_few_rows()
    plan = plan_of_few(batch, packer, ranks_of_row=SHARING_RANKS)
    assert_metrics_agree(update_both_with(padded_ranks, one_rank, batch, plan, TEMPLATE))


def test_so_do_ranks_with_a_mixture_of_experts(transfer_queue, tmp_path):
    model = make_tiny_model("qwen3_moe", tmp_path)
    padded = [*updates.BUDGETS, ULYSSES]
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=padded, ranks=2 * SHARING_RANKS) as both:
        both[0].execute_with_func_generator(SHARE)
        for micro_batch_rows, packer in CUTS:
            assert_agree(*both, "seq-mean-token-mean", micro_batch_rows, packer)
        for packer in PACKERS:
            assert_agree_where_one_group_holds_pads_alone(*both, packer)
        for workers in both:
            start_over(workers, "token-mean")
        batch, plan = batch_and_plan(token_budget=SHARING_RANKS * updates.BUDGET)
        assert_shared(plan, "actor")
        update = update_both_with(*both, batch, plan, TEMPLATE)
        assert_metrics_agree(update)
        assert_packed_as_planned(update)


def test_so_do_critics(transfer_queue, tmp_path):
    model = make_value_model(make_tiny_model("qwen2", tmp_path), tmp_path / "critic")
    overrides = (f"+critic.optim.{ADAM_EPS}", "critic.cliprange_value=0.5")
    budget = "+critic.ppo_infer_max_token_len_per_gpu"
    padded = (f"{budget}={updates.BUDGET}", f"critic.fsdp.ulysses_sequence_parallel_size={SHARING_RANKS}")
    with padded_and_plain(
        start_critic, model, *overrides, padded=padded, plain=[f"{budget}=4096"], ranks=2 * SHARING_RANKS
    ) as critics:
        for cut in CUTS:
            assert_critics_agree(*critics, "token-mean", cut, ranks_of_row=SHARING_RANKS)
        assert_critics_agree_where_some_hold_pads_alone(*critics, ranks_of_row=SHARING_RANKS)
        critics[0].execute_with_func_generator(SHARE)
        for workers in critics:
            start_over(workers, "token-mean")
        batch, plan = batch_and_plan("critic", token_budget=SHARING_RANKS * updates.BUDGET)
        assert_shared(plan, "critic")
        both = update_both_with(*critics, batch, plan, TEMPLATE, "train_mini_batch")
        assert_critic_metrics_agree(both)
        assert_packed_as_planned(both, "critic")
