"""Zero effect on real critics: two padded ranks end with the weights of one rank that never saw a pad."""

from collections.abc import Iterator

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import BUDGETS_OF_CRITICS, CRITIC_TERMS, EACH_CUT, assert_updates_agree
from tests.support.fsdp2_workers import make_value_model, padded_and_plain, start_critic

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


@pytest.fixture(scope="module", params=[2, 4])
def critics(request, transfer_queue, qwen2, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, int]]:
    """Ranks that get pads, one that does not, and how many they are."""
    model = make_value_model(qwen2, tmp_path_factory.mktemp("critic"))
    with padded_and_plain(start_critic, model, *CRITIC_TERMS, **BUDGETS_OF_CRITICS, ranks=request.param) as both:
        yield *both, request.param


@EACH_CUT
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(cut, critics):
    padded_ranks, one_rank, dp_size = critics
    assert_updates_agree(padded_ranks, one_rank, **cut, update="critic", dp_size=dp_size)
