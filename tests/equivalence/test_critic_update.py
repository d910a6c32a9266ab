"""Zero effect on real critics: two padded ranks end with the weights of one rank that never saw a pad."""

from collections.abc import Iterator

import numpy as np
import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import BUDGET, BothUpdates, update_both
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_critic, start_over
from tests.support.tolerance import ADAM_EPS, RELATIVE_METRIC
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]


@pytest.fixture(scope="module")
def critics(transfer_queue, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    folder = tmp_path_factory.mktemp("model")
    model = make_value_model(make_tiny_model("qwen2", folder), folder / "critic")
    overrides = (f"+critic.optim.{ADAM_EPS}", "critic.cliprange_value=0.5")
    budget = "+critic.ppo_infer_max_token_len_per_gpu"
    with padded_and_plain(
        start_critic, model, *overrides, padded=[f"{budget}={BUDGET}"], plain=[f"{budget}=4096"]
    ) as both:
        yield both


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, critics):
    for workers in critics:
        start_over(workers, mode)
    assert_critic_metrics_agree(update_both(*critics, method="train_mini_batch"))


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
