"""Zero effect on vision models: two ranks, one with pads alone, end with the weights of one rank
without pads."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.support.engine_shapes import Shape, started
from tests.support.fsdp2_workers import start_over
from tests.support.plan_oracles import reporting_ranks
from tests.support.trained_batches import with_trained_fields
from tests.support.updates import assert_packed_as_planned, update_both
from tests.support.vision_rows import FAMILIES, make_vision_model, put_vision_rows
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import image_of_pads, images_of_rows
from verl_padding.pads.vision_families import RUNS_WITHOUT_IMAGES, image_maker
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.prefix_sharing.detection import PrefixDetection

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

BUDGET = 64
POLICY_LOSS_ALONE = (
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
)
NEED_FLASH_ATTENTION_TO_PACK = ("qwen2_vl", "qwen2_5_vl")
"""Families whose packed attention verl 0.9.1 has for flash-attn alone
(models/transformers/qwen2_vl.py)."""


@pytest.fixture(scope="module", params=FAMILIES)
def actors(request, transfer_queue, tmp_path_factory):
    """Family, config, two ranks that get pads, and one that does not."""
    model = make_vision_model(request.param, tmp_path_factory.mktemp("model"))
    can_pack = request.param not in NEED_FLASH_ATTENTION_TO_PACK
    packs = f"actor_rollout_ref.model.use_remove_padding={can_pack}"
    job = (*POLICY_LOSS_ALONE, packs)
    budget = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}"
    config = json.loads((model / "config.json").read_text())
    with (
        started(Shape(), model, *job, budget) as padded_ranks,
        # One row a mini-batch is a case of rows of one length.
        started(Shape(ranks=1), model, *job, padded=True) as one_rank,
    ):
        yield request.param, config, padded_ranks, one_rank


def template_for(config, batch):
    """Of pads that show the model's vision tower what it must see."""
    maker = image_maker("auto", config)
    image = image_of_pads(images_of_rows(batch), maker)
    return PadTemplate(eos_token_id=3, length=1 + len(image.token_ids) if image else 2, image=image)


def plan_for(
    batch,
    tries=None,
    *,
    prompts_per_mini_batch=1,
    **of_job,
):
    of_call = {"dp_size": 2, "token_budget": BUDGET}
    update = Update(**of_call, prompts_per_mini_batch=prompts_per_mini_batch)
    job = Job(
        strategy="prompt", sessions_per_prompt=1, updates={"actor": update}, inference={}, **of_job
    )
    return plan_batch(
        Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags], tries), job
    )


def test_a_rank_of_pads_alone_runs_the_vision_tower_and_changes_nothing(actors):
    family, config, padded_ranks, one_rank = actors
    patterns = [[(True,), (True,), (True,)]]
    if (
        family != "gemma3"
    ):  # which leaves its tower out of a micro-batch without an image, pads or not
        patterns.append([(True,), (False,), (True,)])
    for images, packer in product(patterns, ("verl", "plan")):
        start_over((padded_ranks, one_rank), "token-mean")
        torch.manual_seed(0)
        batch = with_trained_fields(put_vision_rows(family, config, images))
        template = template_for(config, batch)
        assert (template.length == 2) == (family in RUNS_WITHOUT_IMAGES)
        plan = plan_for(batch, prompts=3, packer=packer, pad_tokens=template.length)
        assert reporting_ranks(plan.layouts["actor"]) == [1, 1, 1], (
            "one rank was meant to have pads alone"
        )
        update_both(padded_ranks, one_rank, batch, plan, template=template)


# Two families are not packed here. Gemma's random weights have gradients of norm 2000, whose
# rounding, added up in another order, moves weights by 1.1e-6.
@pytest.mark.parametrize("actors", ["qwen3_vl"], indirect=True)
def test_rows_that_begin_with_the_same_images_are_computed_once(actors):
    family, config, sharing, one_rank = actors
    start_over((sharing, one_rank), "seq-mean-token-mean")
    torch.manual_seed(0)
    rows = put_vision_rows(
        family, config, [(True, False, True), (True, True), (True,), (True, False, True)]
    )
    batch = with_trained_fields(rows)
    prefixes = PrefixDetection(batch, may_have_images=True)
    assert prefixes.parent_R == [None, 0, 1, None, 3, None, None, 6, 7]
    template = template_for(config, batch)
    shared = {"packer": "plan", "sharing": "on", "pad_tokens": template.length}
    plan = plan_for(
        batch,
        replace(prefixes.by_outputs, whole_rows_only=True),
        prompts=4,
        prompts_per_mini_batch=2,
        **shared,
    )
    assert plan.figures["actor"].sharing_factor > 1.3
    assert_packed_as_planned(update_both(sharing, one_rank, batch, plan, template=template))
