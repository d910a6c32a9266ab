"""Zero effect on a mixture of experts: FSDP2 ranks whose pads choose experts end with the weights of one rank."""

import pytest

from tests.equivalence.updates import ALL_TERMS, BUDGETS, CUTS, assert_updates_agree
from tests.support.fsdp2_workers import padded_and_plain, start_actor
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(ranks, tmp_path):
    model = make_tiny_model("qwen3_moe", tmp_path)
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=BUDGETS, ranks=ranks) as actors:
        for cut in CUTS.values():
            assert_updates_agree(*actors, **cut, dp_size=ranks)
