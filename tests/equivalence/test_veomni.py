"""Zero effect on verl's VeOmni engine: padded ranks of each shape end with the weights of one rank without pads.

That rank is one of FSDP2: VeOmni shards what it loads.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGETS,
    BUDGETS_OF_CRITICS,
    CRITIC_TERMS,
    CUTS,
    EACH_CUT,
    PAD_TOKENS,
    assert_updates_agree,
    pad_tokens_of,
)
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_actor, start_critic
from verl_padding.local.tiny_models import make_tiny_model

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


@pytest.fixture(scope="module", params=SHAPES)
def actors(request, transfer_queue, qwen2) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, dict[str, int]]]:
    """The padded ranks, the one rank, and what the plan must know of the shape."""
    ranks, sharing = SHAPES[request.param]
    padded = [*ON_VEOMNI, ULYSSES.format(sharing)]
    assert pad_tokens_of(*padded) == PAD_TOKENS
    with padded_and_plain(start_actor, qwen2, *ALL_TERMS, padded=padded, ranks=ranks) as both:
        yield *both, {"dp_size": ranks // sharing, "ranks_of_row": sharing}


def set_adam_eps(worker: Any) -> DataProto:
    """verl's VeOmni engine reads no ``override_optimizer_config``."""
    for group in getattr(worker, "actor", worker).engine.optimizer.param_groups:
        group["eps"] = 1e-5
    return DataProto()


def with_adam_eps(padded_ranks: RayWorkerGroup, _: RayWorkerGroup) -> None:
    padded_ranks.execute_with_func_generator(set_adam_eps)


@EACH_CUT
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(cut, actors):
    padded_ranks, one_rank, shape = actors
    if shape["dp_size"] == 1 and "few" in cut:
        pytest.skip("its ranks share every row")
    assert_updates_agree(padded_ranks, one_rank, **cut, **shape, started=with_adam_eps)


EACH_SHARING = pytest.mark.parametrize("sharing", [1, 2], ids=["dp2", "two ranks to a row"])


@EACH_SHARING
def test_so_do_ranks_with_a_mixture_of_experts(sharing, transfer_queue, tmp_path):
    padded = [*ON_VEOMNI, ULYSSES.format(sharing)]
    assert_agree(start_actor, make_tiny_model("qwen3_moe", tmp_path), sharing, *ALL_TERMS, padded=padded)


@EACH_SHARING
def test_so_do_critics(sharing, transfer_queue, qwen2, tmp_path):
    on_veomni = (
        "+local=cpu_veomni",
        "critic.optim.lr_scheduler_type=constant",
        f"critic.veomni.ulysses_parallel_size={sharing}",
        *BUDGETS_OF_CRITICS["padded"],
    )
    eps, clip = CRITIC_TERMS
    of_sides = {"padded": on_veomni, "plain": [*BUDGETS_OF_CRITICS["plain"], eps]}
    assert_agree(start_critic, make_value_model(qwen2, tmp_path), sharing, clip, **of_sides, update="critic")


def assert_agree(start, model, sharing, *overrides, update="actor", **of_sides):
    with padded_and_plain(start, model, *overrides, **of_sides) as both:
        shape = {"dp_size": 2 // sharing, "ranks_of_row": sharing}
        for cut in CUTS.values():
            if sharing == 1 or "few" not in cut:
                assert_updates_agree(*both, **cut, **shape, update=update, started=with_adam_eps)
