"""Zero effect on real critics: two padded ranks end with the weights of one rank that never saw a pad."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import (
    BUDGET,
    CUTS,
    PACKERS,
    PAD_TOKENS,
    BothUpdates,
    assert_cut_as_told,
    plan_of_few,
    put_few_rows,
    update_both,
    update_both_with,
)
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_critic, start_over, stop
from tests.support.tolerance import ADAM_EPS, RELATIVE_METRIC
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.template import PadTemplate
from verl_padding.worker.losses import wrap_worker_loss
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


BUDGET_OF_PASSES = "+critic.ppo_infer_max_token_len_per_gpu"
OVERRIDES = (f"+critic.optim.{ADAM_EPS}", "critic.cliprange_value=0.5")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_value_model(make_tiny_model("qwen2", folder), folder / "critic")


@pytest.fixture(scope="module")
def critics(transfer_queue, model) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    budgets = {"padded": [f"{BUDGET_OF_PASSES}={BUDGET}"], "plain": [f"{BUDGET_OF_PASSES}=4096"]}
    with padded_and_plain(start_critic, model, *OVERRIDES, **budgets) as both:
        yield both


@pytest.fixture(scope="module")
def four_ranks(transfer_queue, model) -> Iterator[RayWorkerGroup]:
    ranks = start_critic(model, 4, *OVERRIDES, f"{BUDGET_OF_PASSES}={BUDGET}")
    ranks.execute_with_func_generator(wrap_worker_loss("rows"))
    yield ranks
    stop(ranks)


def assert_critics_agree(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, mode: str, cut: tuple[int | None, str], **shape: int
) -> None:
    """After the same update from the same start."""
    micro_batch_rows, packer = cut
    start_over(one_rank, mode)
    start_over(padded_ranks, mode, micro_batch_rows)
    padded_ranks.execute_with_func_generator(install())
    sizes = {"micro_batch_rows": micro_batch_rows, **shape}
    both = update_both(padded_ranks, one_rank, "train_mini_batch", packer, **sizes)
    assert_critic_metrics_agree(both)
    assert_cut_as_told(both, packer, micro_batch_rows, "critic")


def assert_critics_agree_where_some_hold_pads_alone(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, **shape: int
) -> None:
    for packer in PACKERS:
        for workers in (padded_ranks, one_rank):
            start_over(workers, "seq-mean-token-sum")
        padded_ranks.execute_with_func_generator(install())
        batch = put_few_rows()
        plan = plan_of_few(batch, packer, update="critic", **shape)
        template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
        both = update_both_with(padded_ranks, one_rank, batch, plan, template, "train_mini_batch")
        assert_critic_metrics_agree(both)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, cut, critics):
    assert_critics_agree(*critics, mode, cut)


@pytest.mark.parametrize("cut", CUTS)
def test_so_do_four_ranks(cut, critics, four_ranks):
    assert_critics_agree(four_ranks, critics[1], "token-mean", cut, dp_size=4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_so_do_ranks_of_which_all_but_one_hold_pads_alone(ranks, critics, four_ranks):
    padded_ranks = critics[0] if ranks == 2 else four_ranks
    assert_critics_agree_where_some_hold_pads_alone(padded_ranks, critics[1], dp_size=ranks)


def assert_critic_metrics_agree(both: BothUpdates) -> None:
    for name in ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "grad_norm"):
        np.testing.assert_allclose(
            both.padded[name],
            [np.ravel(step[name])[0] for step in both.plain],
            rtol=RELATIVE_METRIC,
            atol=5e-7,
            err_msg=name,
        )
    assert max(np.ravel(step["critic/vf_clipfrac"])[0] for step in both.plain) > 0
