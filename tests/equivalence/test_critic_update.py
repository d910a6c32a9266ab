"""Zero effect on real critics: two padded ranks end with the weights of one rank that never saw a pad."""

from collections.abc import Iterator

import numpy as np
import pytest
import transfer_queue as tq
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import ADAM_EPS, BUDGET, update_both
from tests.equivalence.workers import make_value_model, start_critic, start_over, stop
from tests.pads.rows_in_queue import PARTITION, queue_content
from tests.tolerance import RELATIVE_METRIC
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.trainer.losses import wrap_worker_loss

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]


@pytest.fixture(scope="module")
def critics(transfer_queue, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    folder = tmp_path_factory.mktemp("model")
    model = make_value_model(make_tiny_model("qwen2", folder), folder / "critic")
    overrides = (f"+critic.optim.{ADAM_EPS}", "critic.cliprange_value=0.5")
    padded_ranks = start_critic(model, 2, *overrides, f"+critic.ppo_infer_max_token_len_per_gpu={BUDGET}")
    one_rank = start_critic(model, 1, *overrides, "+critic.ppo_infer_max_token_len_per_gpu=4096")
    padded_ranks.execute_with_func_generator(wrap_worker_loss("rows"))
    yield padded_ranks, one_rank
    stop(padded_ranks)
    stop(one_rank)
    tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, critics):
    for workers in critics:
        start_over(workers, mode)
    both = update_both(*critics, method="train_mini_batch")
    for name in ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "grad_norm"):
        np.testing.assert_allclose(
            both.padded[name],
            [np.ravel(step[name])[0] for step in both.plain],
            rtol=RELATIVE_METRIC,
            atol=5e-7,
            err_msg=name,
        )
    assert max(np.ravel(step["critic/vf_clipfrac"])[0] for step in both.plain) > 0
