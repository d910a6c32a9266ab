"""Zero effect on a mixture of experts: FSDP2 ranks whose pads choose experts end with the weights of one rank."""

from pathlib import Path

import pytest

from tests.equivalence.test_actor_update import BUDGETS, assert_metrics_agree
from tests.equivalence.updates import ALL_TERMS, assert_packed_as_planned, update_both
from tests.support.fsdp2_workers import padded_and_plain, start_actor, start_over
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.patches.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(transfer_queue, tmp_path):
    assert_ranks_agree_with_one(2, tmp_path)


def test_so_do_four_ranks(transfer_queue, tmp_path):
    assert_ranks_agree_with_one(4, tmp_path)


def assert_ranks_agree_with_one(ranks: int, folder: Path) -> None:
    model = make_tiny_model("qwen3_moe", folder)
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=BUDGETS, ranks=ranks) as actors:
        for mode, packer in (("token-mean", "verl"), ("seq-mean-token-mean", "plan")):
            for workers in actors:
                start_over(workers, mode)
            if packer == "plan":
                actors[0].execute_with_func_generator(install())
            both = update_both(*actors, packer=packer, dp_size=ranks)
            assert_metrics_agree(both)
            if packer == "plan":
                assert_packed_as_planned(both)
