"""Two groups of two ranks that share rows (Ulysses) end with the weights of one rank without pads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.test_critic_update import assert_critic_metrics_agree
from tests.equivalence.test_shared_prefixes import (
    BUDGET,
    BUDGETS,
    SHARE,
    TEMPLATE,
    assert_metrics_agree,
    assert_shared,
    batch_and_plan,
)
from tests.equivalence.updates import (
    ALL_TERMS,
    EPOCHS,
    assert_packed_as_planned,
    plan_of_few,
    put_few_rows,
    update_both,
    update_both_with,
)
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_actor, start_critic, start_over
from tests.support.tolerance import ADAM_EPS
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.patches.plan_packer import install
from verl_padding.trainer.losses import MICRO_BATCHES

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


@pytest.mark.parametrize("micro_batch_rows", [None, 2], ids=["token budget", "fixed rows"])
def test_so_do_they_where_verl_cuts_the_micro_batches(micro_batch_rows, actors):
    padded_ranks, one_rank = actors
    start_over(one_rank, "token-mean")
    start_over(padded_ranks, "token-mean", micro_batch_rows)
    both = update_both(padded_ranks, one_rank, micro_batch_rows=micro_batch_rows, ranks_of_row=SHARING_RANKS)
    assert_metrics_agree(both)
    if micro_batch_rows:
        per_step = both.layout.rows_per_cell / micro_batch_rows
        assert both.padded[MICRO_BATCHES] == [per_step] * EPOCHS * both.layout.n_mini_batches


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_so_do_they_where_one_group_holds_pads_alone(packer, actors):
    for workers in actors:
        start_over(workers, "seq-mean-token-mean")
    batch = put_few_rows()
    plan = plan_of_few(batch, packer, ranks_of_row=SHARING_RANKS)
    assert_metrics_agree(update_both_with(*actors, batch, plan, TEMPLATE))


def test_so_do_ranks_with_a_mixture_of_experts(transfer_queue, tmp_path):
    model = make_tiny_model("qwen3_moe", tmp_path)
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=[*BUDGETS, ULYSSES], ranks=2 * SHARING_RANKS) as both:
        for workers in both:
            start_over(workers, "seq-mean-token-mean")
        assert_metrics_agree(update_both(*both, ranks_of_row=SHARING_RANKS))


def test_so_do_critics(transfer_queue, tmp_path):
    model = make_value_model(make_tiny_model("qwen2", tmp_path), tmp_path / "critic")
    overrides = (f"+critic.optim.{ADAM_EPS}", "critic.cliprange_value=0.5")
    budget = "+critic.ppo_infer_max_token_len_per_gpu"
    padded = (f"{budget}={BUDGET}", f"critic.fsdp.ulysses_sequence_parallel_size={SHARING_RANKS}")
    with padded_and_plain(
        start_critic, model, *overrides, padded=padded, plain=[f"{budget}=4096"], ranks=2 * SHARING_RANKS
    ) as critics:
        for packer in ("verl", "plan"):
            for workers in critics:
                start_over(workers, "token-mean")
            if packer == "plan":
                critics[0].execute_with_func_generator(install())
            both = update_both(*critics, method="train_mini_batch", packer=packer, ranks_of_row=SHARING_RANKS)
            assert_critic_metrics_agree(both)
