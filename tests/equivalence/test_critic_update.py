"""Zero effect on real critics: two padded ranks end with the weights of one rank that never saw a pad."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import BUDGET, EPOCHS, BothUpdates, assert_packed_as_planned, update_both
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_critic, start_over, stop
from tests.support.tolerance import ADAM_EPS, RELATIVE_METRIC
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.patches.plan_packer import install
from verl_padding.trainer.losses import MICRO_BATCHES, wrap_worker_loss

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


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, critics):
    for workers in critics:
        start_over(workers, mode)
    assert_critic_metrics_agree(update_both(*critics, method="train_mini_batch"))


def test_so_do_four_ranks(critics, four_ranks):
    _, one_rank = critics
    for workers in (four_ranks, one_rank):
        start_over(workers, "token-mean")
    assert_critic_metrics_agree(update_both(four_ranks, one_rank, method="train_mini_batch", dp_size=4))


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_so_do_ranks_with_micro_batches_of_fixed_size(packer, critics):
    padded_ranks, one_rank = critics
    start_over(padded_ranks, "seq-mean-token-sum", micro_batch_rows=2)
    start_over(one_rank, "seq-mean-token-sum")
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())
    both = update_both(*critics, method="train_mini_batch", packer=packer, micro_batch_rows=2)
    assert_critic_metrics_agree(both)
    assert both.padded[MICRO_BATCHES] == [both.layout.rows_per_cell / 2] * EPOCHS * 3


def test_so_do_ranks_whose_micro_batches_the_plan_cuts(critics):
    for workers in critics:
        start_over(workers, "token-mean")
    padded_ranks, _ = critics
    padded_ranks.execute_with_func_generator(install())
    both = update_both(*critics, method="train_mini_batch", packer="plan")
    assert_critic_metrics_agree(both)
    assert_packed_as_planned(both, "critic")


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
