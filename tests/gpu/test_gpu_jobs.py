"""Whole jobs of the tiny recipes on a GPU, with vLLM as the rollout: ``pytest -m gpu
tests/gpu/test_gpu_jobs.py``.

One rank needs pads only where mini-batches have a fixed size, so these jobs pad as verl would.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.recipes.context_reset import job as context_reset
from verl_padding.recipes.every_call import job as every_call

STEPS = 3
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ON_A_GPU = (
    "+padding=lcm",
    "trainer.n_gpus_per_node=1",
    f"{ACTOR}.strategy=fsdp2",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.gpu_memory_utilization=0.2",
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.calculate_log_probs=true",
    "trainer.logger=[console,file]",
    f"trainer.total_training_steps={STEPS}",
)
DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=true", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true")
PLAN = "padding.packer=plan"
BFLOAT16 = (f"{ACTOR}.fsdp_config.model_dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=bfloat16")


def experts(folder):
    """The tiny recipe on a mixture whose rollout records routes; a metric of verl's says whether
    rows have them."""
    recorded = (
        f"{ROLLOUT}.enable_rollout_routing_replay=true",
        f"{ROLLOUT}.moe_load_balance_metrics_interval=1",
    )
    model = make_tiny_model("qwen3_moe", folder)
    return [*context_reset.tiny_job(folder), f"actor_rollout_ref.model.path={model}", *recorded]


@dataclass(frozen=True)
class Case:
    recipe: Callable[[Path], list[str]]
    overrides: tuple[str, ...]
    packages: tuple[str, ...] = ()

    def job(self, folder):
        return [*self.recipe(folder), *ON_A_GPU, *self.overrides]


FLASH = "flash_attn"
CASES = {
    "flash attention computes rows beside pads in bfloat16": Case(
        context_reset.tiny_job,
        (
            *DYNAMIC,
            *BFLOAT16,
            "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
        ),
        (FLASH,),
    ),
    "the workers have the micro-batches of the plan": Case(
        context_reset.tiny_job, (*DYNAMIC, PLAN)
    ),
    "prefixes that rows share are computed once": Case(
        every_call.tiny_job, (*DYNAMIC, PLAN, "padding.sharing=on")
    ),
    "a micro-batch of pads alone has a backward pass": Case(
        context_reset.tiny_job,
        (
            f"{ACTOR}.use_dynamic_bsz=false",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
            f"{ROLLOUT}.log_prob_use_dynamic_bsz=false",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        ),
    ),
    "pads show the vision tower of Qwen3-VL an image": Case(
        lambda folder: context_reset.tiny_job(folder, images=True),
        DYNAMIC,
        ("torchvision", "qwen_vl_utils"),
    ),
    "rows with routes that vLLM has recorded are trained beside pads": Case(experts, DYNAMIC),
}
"""What a job would show."""


def is_there(module):
    return find_spec(module.partition(".")[0]) is not None and find_spec(module) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, tmp_path):
    case = CASES[name]
    missing = [package for package in ("vllm", *case.packages) if not is_there(package)]
    if not torch.cuda.is_available() or missing:
        pytest.skip(f"takes a GPU, and lacks {', '.join(missing) or 'nothing else'}")
    steps = train_on_a_gpu(case.job(tmp_path), tmp_path)
    for step in steps:
        assert [name for name, value in step.items() if not math.isfinite(value)] == []
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 0.2, (
            "rollout and trainer have other weights"
        )
        assert case.recipe is not experts or step["rollout/moe/routed_experts_found"] == 1
        if PLAN in case.overrides:
            # Of the plan, which has the pass take over the micro-batches of the update, and of the
            # workers.
            done = step["padding/actor/micro_batches"] * step["padding/actor/optimizer_steps/total"]
            assert done == pytest.approx(step["padding/log_prob/micro_batches"])
    assert sum(step["padding/pad_rows/total"] for step in steps) > 0, "no pad was met"
    assert "prefixes" not in name or any(step["padding/actor/sharing_factor"] > 1 for step in steps)


def train_on_a_gpu(overrides, folder):
    """Runs a job, and gives the metrics of each step."""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment |= {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    job = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert job.returncode == 0, job.stdout[-5000:] + job.stderr[-5000:]
    steps = [
        json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == STEPS
    return steps
