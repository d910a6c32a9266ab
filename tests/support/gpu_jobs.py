"""Whole jobs of the tiny recipes on GPUs, with vLLM as the rollout."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

STEPS = 3
ON_GPUS = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "trainer.logger=[console,file]",
    f"trainer.total_training_steps={STEPS}",
)
RECORDED_ROUTES = (
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
    "actor_rollout_ref.rollout.moe_load_balance_metrics_interval=1",  # which says whether rows have routes
)
ROUTES_FOUND = "rollout/moe/routed_experts_found"
"""verl's metric: 1 if the rows of the step have routes."""
DYNAMIC = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
)


def needs_gpus(number: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that trains on so many GPUs."""
    words = "one GPU" if number == 1 else f"{number} GPUs"
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < number, reason=f"takes {words}"),
        pytest.mark.skipif(find_spec("vllm") is None, reason="takes vLLM"),
    ]


def skip_without(*modules: str) -> None:
    for module in modules:
        package = module.partition(".")[0]
        if find_spec(package) is None or find_spec(module) is None:
            pytest.skip(f"takes {module}")


def train_on_gpus(overrides: Sequence[str], folder: Path) -> list[dict]:
    """Runs a job, and gives the metrics of each step; pads were met, and no metric is NaN."""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment |= {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    job = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert job.returncode == 0, job.stdout[-5000:] + job.stderr[-5000:]
    steps = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    assert sum(step["padding/pad_rows/total"] for step in steps) > 0, "no pad was met"
    for step in steps:
        assert [name for name, value in step.items() if not math.isfinite(value)] == []
        assert step["actor/grad_norm"] > 0
    return steps
