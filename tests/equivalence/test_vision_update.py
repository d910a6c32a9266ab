"""Zero effect on vision models: two ranks, one with pads alone, end with the weights of one rank without pads."""

import json
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import assert_packed_as_planned, update_both_with, with_trained_fields
from tests.support.fsdp2_workers import padded_and_plain, start_actor, start_over
from tests.support.tolerance import ADAM_EPS
from tests.support.vision_rows import FAMILIES, make_vision_model, put_grown_vision_rows, put_vision_rows
from verl_padding.pads.lineage import find_extensions
from verl_padding.pads.source import find_images
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.vision_families import RUNS_WITHOUT_IMAGES, image_for
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.worker import plan_packer, position_ids, text_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


BUDGET = 64
NEED_FLASH_ATTENTION_TO_PACK = ("qwen2_vl", "qwen2_5_vl")
"""Families whose packed attention verl 0.9.1 has for flash-attn alone (models/transformers/qwen2_vl.py)."""


@pytest.fixture(scope="module", params=FAMILIES)
def actors(request, transfer_queue, tmp_path_factory) -> Iterator[tuple[str, dict, RayWorkerGroup, RayWorkerGroup]]:
    """Family, config, two ranks that get pads, and one that does not."""
    model = make_vision_model(request.param, tmp_path_factory.mktemp("model"))
    overrides = [f"+actor_rollout_ref.actor.optim.{ADAM_EPS}"]
    if request.param in NEED_FLASH_ATTENTION_TO_PACK:
        overrides.append("actor_rollout_ref.model.use_remove_padding=false")
    config = json.loads((model / "config.json").read_text())
    budget = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}"
    with padded_and_plain(start_actor, model, *overrides, padded=[budget]) as both:
        both[0].execute_with_func_generator(plan_packer.install("chains"))  # lets pass what no plan has cut
        for workers in both:  # one row a mini-batch is a case of rows of one length
            workers.execute_with_func_generator(position_ids.install_in_worker)
            workers.execute_with_func_generator(text_rows.install_in_worker)
        yield request.param, config, *both


def test_a_rank_of_pads_alone_runs_the_vision_tower_and_changes_nothing(actors):
    family, config, padded_ranks, one_rank = actors
    patterns = [[True, True, True]]
    if family != "gemma3":  # which leaves its tower out of a micro-batch without an image, pads or not
        patterns.append([True, False, True])
    for with_image, packer in product(patterns, ("verl", "plan")):
        for workers in (padded_ranks, one_rank):
            start_over(workers, "token-mean")
        torch.manual_seed(0)
        batch = with_trained_fields(put_vision_rows(family, config, with_image), torch.Generator().manual_seed(0))
        image = image_for("auto", config, find_images(batch))
        assert (image is None) == (family in RUNS_WITHOUT_IMAGES)
        length = 1 + len(image.token_ids) if image else 2
        job = Job(
            strategy="prompt",
            prompts=3,
            sessions_per_prompt=1,
            updates={"actor": Update(dp_size=2, token_budget=BUDGET, prompts_per_mini_batch=1)},
            inference={},
            pad_tokens=length,
            packer=packer,
        )
        plan = plan_batch(Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags]), job)
        assert plan.layouts["actor"].reporting_ranks_M == (1, 1, 1), "one rank was meant to have pads alone"
        template = PadTemplate(eos_token_id=3, length=length, image=image)
        update_both_with(padded_ranks, one_rank, batch, plan, template)


# Two rows of four axes of positions and two tokens: they have as many values as two rows of two axes and four tokens.
@pytest.mark.parametrize("actors", ["qwen3_vl"], indirect=True)
def test_a_rank_of_exactly_two_pads_changes_nothing(actors):
    family, config, padded_ranks, one_rank = actors
    for packer in ("verl", "plan"):
        for workers in (padded_ranks, one_rank):
            start_over(workers, "token-mean")
        torch.manual_seed(0)
        rows = put_grown_vision_rows(family, config, [(True, False, False), (True,)])
        batch = with_trained_fields(rows, torch.Generator().manual_seed(0))
        job = Job(
            strategy="prompt",
            prompts=2,
            sessions_per_prompt=1,
            updates={"actor": Update(dp_size=2, token_budget=BUDGET, prompts_per_mini_batch=1)},
            inference={},
            pad_tokens=2,
            packer=packer,
        )
        plan = plan_batch(Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags]), job)
        cells = [cell for ranks in plan.layouts["actor"].cells for cell in ranks]
        assert [len(cell) for cell in cells if min(cell) >= len(batch)] == [2], "one rank was meant to have two pads"
        update_both_with(padded_ranks, one_rank, batch, plan, PadTemplate(eos_token_id=3, length=2))


# Two families are not packed here. Gemma's random weights have gradients of norm 2000, whose rounding, added up in
# another order, moves weights by 1.1e-6.
@pytest.mark.parametrize("actors", ["qwen3_vl"], indirect=True)
def test_rows_that_begin_with_the_same_images_are_computed_once(actors):
    family, config, sharing, one_rank = actors
    for workers in (sharing, one_rank):
        start_over(workers, "seq-mean-token-mean")
    torch.manual_seed(0)
    rows = put_grown_vision_rows(family, config, [(True, False, True), (True, True), (True,), (True, False, True)])
    batch = with_trained_fields(rows, torch.Generator().manual_seed(0))
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    extends_R = find_extensions(batch, tokens_R)
    assert extends_R == [None, 0, 1, None, 3, None, None, 6, 7]
    image = image_for("auto", config, find_images(batch))
    length = 1 + len(image.token_ids) if image else 2
    job = Job(
        strategy="prompt",
        prompts=4,
        sessions_per_prompt=1,
        updates={"actor": Update(dp_size=2, token_budget=BUDGET, prompts_per_mini_batch=2)},
        inference={},
        pad_tokens=length,
        packer="plan",
        sharing="chains",
    )
    plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, extends_R), job)
    assert plan.figures["actor"].sharing_factor > 1.3
    template = PadTemplate(eos_token_id=3, length=length, image=image)
    both = update_both_with(sharing, one_rank, batch, plan, template)
    assert_packed_as_planned(both)
