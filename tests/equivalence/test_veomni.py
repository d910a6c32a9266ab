"""Zero effect on verl's VeOmni engine: padded ranks of each shape end with the weights of one rank without pads.

That rank is one of FSDP2: VeOmni shards what it loads.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.test_actor_update import assert_metrics_agree
from tests.equivalence.test_critic_update import assert_critic_metrics_agree
from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGET,
    BUDGETS,
    CUTS,
    PACKERS,
    PAD_TOKENS,
    BothUpdates,
    assert_cut_as_told,
    pad_tokens_of,
    plan_of_few,
    put_few_rows,
    update_both,
    update_both_with,
)
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_actor, start_critic, start_over
from tests.support.tolerance import ADAM_EPS
from verl_padding.driver.worker_calls import UPDATE_CALLS
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.template import PadTemplate
from verl_padding.worker.plan_packer import install

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.veomni,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]

ON_VEOMNI = (*BUDGETS, "+local=cpu_veomni", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
ULYSSES = "actor_rollout_ref.actor.veomni.ulysses_parallel_size={}"
SHAPES = {"dp2": (2, 1), "two ranks to a row": (2, 2), "two ranks to a row x dp2": (4, 2)}
"""Ranks, and how many share a row."""
MODES = ["token-mean", "seq-mean-token-mean"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=SHAPES)
def actors(request, transfer_queue, model) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, dict[str, int]]]:
    """The padded ranks, the one rank, and what the plan must know of the shape."""
    ranks, sharing = SHAPES[request.param]
    padded = [*ON_VEOMNI, ULYSSES.format(sharing)]
    assert pad_tokens_of(*padded) == PAD_TOKENS
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=padded, ranks=ranks) as both:
        yield *both, {"dp_size": ranks // sharing, "ranks_of_row": sharing}


def set_adam_eps(worker: Any) -> DataProto:
    """verl's VeOmni engine reads no ``override_optimizer_config``."""
    for group in getattr(worker, "actor", worker).engine.optimizer.param_groups:
        group["eps"] = 1e-5
    return DataProto()


def start_both_over(
    padded_ranks: RayWorkerGroup,
    one_rank: RayWorkerGroup,
    mode: str,
    packer: str,
    micro_batch_rows: int | None = None,
) -> None:
    start_over(one_rank, mode)
    start_over(padded_ranks, mode, micro_batch_rows)
    padded_ranks.execute_with_func_generator(set_adam_eps)
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("mode", MODES)
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, packer, actors):
    padded_ranks, one_rank, shape = actors
    start_both_over(padded_ranks, one_rank, mode, packer)
    both = update_both(padded_ranks, one_rank, packer=packer, **shape)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("mode", MODES)
def test_so_do_ranks_with_micro_batches_of_fixed_size(mode, packer, actors):
    padded_ranks, one_rank, shape = actors
    start_both_over(padded_ranks, one_rank, mode, packer, micro_batch_rows=2)
    both = update_both(padded_ranks, one_rank, packer=packer, micro_batch_rows=2, **shape)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer, 2)


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_ranks_of_which_some_hold_pads_alone(packer, actors):
    padded_ranks, one_rank, shape = actors
    if shape["dp_size"] == 1:
        pytest.skip("its ranks share every row")
    assert_metrics_agree(update_both_with_few_rows(padded_ranks, one_rank, packer, **shape))


def update_both_with_few_rows(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, packer: str, method: str = "update_actor", **shape: int
) -> BothUpdates:
    start_both_over(padded_ranks, one_rank, MODES[1], packer)
    batch = put_few_rows()
    plan = plan_of_few(batch, packer, update=UPDATE_CALLS[method], **shape)
    template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
    return update_both_with(padded_ranks, one_rank, batch, plan, template, method)


@pytest.mark.parametrize("sharing", [1, 2], ids=["dp2", "two ranks to a row"])
def test_so_do_ranks_with_a_mixture_of_experts(sharing, transfer_queue, tmp_path):
    mixture = make_tiny_model("qwen3_moe", tmp_path)
    padded = [*ON_VEOMNI, ULYSSES.format(sharing)]
    with padded_and_plain(start_actor, mixture, *ALL_TERMS, padded=padded) as (padded_ranks, one_rank):
        for micro_batch_rows, packer in CUTS:
            start_both_over(padded_ranks, one_rank, MODES[1], packer, micro_batch_rows)
            shape = {"micro_batch_rows": micro_batch_rows, "dp_size": 2 // sharing, "ranks_of_row": sharing}
            both = update_both(padded_ranks, one_rank, packer=packer, **shape)
            assert_metrics_agree(both)
            assert_cut_as_told(both, packer, micro_batch_rows)
        for packer in PACKERS if sharing == 1 else ():
            assert_metrics_agree(update_both_with_few_rows(padded_ranks, one_rank, packer))


@pytest.mark.parametrize("sharing", [1, 2], ids=["dp2", "two ranks to a row"])
def test_so_do_critics(sharing, transfer_queue, tmp_path):
    model = make_value_model(make_tiny_model("qwen2", tmp_path), tmp_path / "critic")
    budget = "+critic.ppo_infer_max_token_len_per_gpu"
    on_veomni = (
        "+local=cpu_veomni",
        "critic.optim.lr_scheduler_type=constant",
        f"critic.veomni.ulysses_parallel_size={sharing}",
        f"{budget}={BUDGET}",
    )
    plain = (f"{budget}=4096", f"+critic.optim.{ADAM_EPS}")
    with padded_and_plain(start_critic, model, "critic.cliprange_value=0.5", padded=on_veomni, plain=plain) as (
        padded_ranks,
        one_rank,
    ):
        for micro_batch_rows, packer in CUTS:
            start_both_over(padded_ranks, one_rank, "token-mean", packer, micro_batch_rows)
            shape = {"micro_batch_rows": micro_batch_rows, "dp_size": 2 // sharing, "ranks_of_row": sharing}
            both = update_both(padded_ranks, one_rank, "train_mini_batch", packer, **shape)
            assert_critic_metrics_agree(both)
            assert_cut_as_told(both, packer, micro_batch_rows, "critic")
        for packer in PACKERS if sharing == 1 else ():
            assert_critic_metrics_agree(update_both_with_few_rows(padded_ranks, one_rank, packer, "train_mini_batch"))
