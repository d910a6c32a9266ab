"""What a single GPU can show: run with ``pytest -m gpu tests/gpu/test_one_gpu.py``.

One rank needs pads only where mini-batches have a fixed size, so the jobs pad as verl would, with ``+padding=lcm``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gpu_jobs import (
    DYNAMIC,
    ON_GPUS,
    RECORDED_ROUTES,
    ROUTES_FOUND,
    needs_gpus,
    skip_without,
    train_on_gpus,
)
from tests.support.verl_config import compose_job
from verl_padding.job.job_reader import JobReader, check_job
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.recipes.context_reset import job as context_reset
from verl_padding.recipes.every_call import job as every_call

ACTOR = "actor_rollout_ref.actor"
PLAN = "padding.packer=plan"
FLASH_ATTENTION = (
    "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
    f"{ACTOR}.fsdp_config.model_dtype=bfloat16",
    f"{ACTOR}.fsdp_config.dtype=bfloat16",
)


def text(folder: Path) -> list[str]:
    return context_reset.tiny_job(folder)


def images(folder: Path) -> list[str]:
    return context_reset.tiny_job(folder, images=True)


def experts(folder: Path) -> list[str]:
    model = make_tiny_model("qwen3_moe", folder)
    return [*context_reset.tiny_job(folder), f"actor_rollout_ref.model.path={model}", *RECORDED_ROUTES]


@dataclass(frozen=True)
class Case:
    recipe: Callable[[Path], list[str]]
    overrides: tuple[str, ...]
    packages: tuple[str, ...] = ()

    def job(self, folder: Path) -> list[str]:
        common = [*ON_GPUS, f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=1", "+padding=lcm"]
        return [*self.recipe(folder), *common, *self.overrides]


CASES = {
    "flash attention computes rows beside pads in bfloat16": Case(text, (*DYNAMIC, *FLASH_ATTENTION)),
    "the workers have the micro-batches of the plan": Case(text, (*DYNAMIC, PLAN)),
    "prefixes that rows share are computed once": Case(every_call.tiny_job, (*DYNAMIC, PLAN, "padding.sharing=chains")),
    "a micro-batch of pads alone has a backward pass": Case(
        text,
        (
            f"{ACTOR}.use_dynamic_bsz=false",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        ),
    ),
    "pads show the vision tower of Qwen3-VL an image": Case(images, DYNAMIC, ("torchvision", "qwen_vl_utils")),
    "rows with routes that vLLM has recorded are trained beside pads": Case(experts, DYNAMIC),
}
"""What a job would show."""


@pytest.mark.parametrize("name", CASES)
def test_the_plugin_reads_the_job_in_which(name, tmp_path):
    config = compose_job(*CASES[name].job(tmp_path))
    padding = check_job(config).padding
    reader = JobReader(config, padding)
    assert reader.configured_dp_sizes()["actor"] == 1
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert reader.has_vision == ("vision" in name)
    assert (reader.n_experts or 0) == (4 if "routes" in name else 0)
    assert padding.sharing == ("chains" if "prefixes" in name else "off")
    attention = reader.engines["actor"].attention
    assert attention == "flash_attention_2", "transformers' default of verl is what this would show"


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1)) for name in CASES])
def test_on_one_gpu(name, tmp_path):
    skip_without("flash_attn", *CASES[name].packages)
    steps = train_on_gpus(CASES[name].job(tmp_path), tmp_path)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 0.2, "rollout and trainer have other weights"
    if PLAN in CASES[name].overrides:
        # Of the plan, which has the pass take over the micro-batches of the update, and of the workers.
        planned = [step["padding/log_prob/micro_batches"] for step in steps]
        steps_taken = [step["padding/actor/optimizer_steps/total"] for step in steps]
        done = [step["padding/actor/micro_batches"] * n for step, n in zip(steps, steps_taken, strict=True)]
        assert done == pytest.approx(planned)
    if "routes" in name:
        assert all(step[ROUTES_FOUND] == 1 for step in steps)
    if "prefixes" in name:
        assert any(step["padding/actor/sharing_factor"] > 1 for step in steps)
