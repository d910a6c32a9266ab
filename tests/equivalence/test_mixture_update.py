"""Zero effect on a mixture of experts: FSDP2 ranks whose pads choose experts end with the weights of one rank."""

from itertools import cycle
from pathlib import Path

import pytest

from tests.equivalence.test_actor_update import assert_metrics_agree
from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGETS,
    CUTS,
    PACKERS,
    PAD_TOKENS,
    assert_cut_as_told,
    plan_of_few,
    put_few_rows,
    update_both,
    update_both_with,
)
from tests.support.fsdp2_workers import padded_and_plain, start_actor, start_over
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.template import PadTemplate
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

MODES = ("token-mean", "seq-mean-token-mean")


def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(transfer_queue, tmp_path):
    assert_ranks_agree_with_one(2, tmp_path)


def test_so_do_four_ranks(transfer_queue, tmp_path):
    assert_ranks_agree_with_one(4, tmp_path)


def assert_ranks_agree_with_one(ranks: int, folder: Path) -> None:
    model = make_tiny_model("qwen3_moe", folder)
    with padded_and_plain(start_actor, model, *ALL_TERMS, padded=BUDGETS, ranks=ranks) as actors:
        actors[0].execute_with_func_generator(install())
        for mode, (micro_batch_rows, packer) in zip(cycle(MODES), CUTS):
            start_over(actors[1], mode)
            start_over(actors[0], mode, micro_batch_rows)
            both = update_both(*actors, packer=packer, micro_batch_rows=micro_batch_rows, dp_size=ranks)
            assert_metrics_agree(both)
            assert_cut_as_told(both, packer, micro_batch_rows)
        for packer in PACKERS:
            for workers in actors:
                start_over(workers, "seq-mean-token-mean")
            batch = put_few_rows()
            plan = plan_of_few(batch, packer, dp_size=ranks)
            template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
            assert_metrics_agree(update_both_with(*actors, batch, plan, template))
