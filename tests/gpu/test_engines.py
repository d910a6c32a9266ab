"""verl's GPU engines, with routes that vLLM has recorded: run with ``pytest -m gpu`` on a node of two GPUs."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.verl_config import compose_job
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.recipes.context_reset.job import tiny_job
from verl_padding.verl_job.job_reader import JobReader, check_job

STEPS = 3
# The recipe's schedule is FSDP's: other engines' optimizers have other settings for theirs.
NO_SCHEDULE = [f"~actor_rollout_ref.actor.optim.{name}" for name in ("lr_scheduler_type", "min_lr_ratio")]
# The engine, the package that it takes, and what has it replay the routes of the rollout.
ENGINES = {
    "fsdp2": (
        "torch",
        [
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        ],
    ),
    "megatron": (
        "megatron",
        [
            "model_engine=megatron",
            *NO_SCHEDULE,
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        ],
    ),
    "veomni": (
        "veomni",
        [
            "model_engine=veomni",
            *NO_SCHEDULE,
            "actor_rollout_ref.actor.veomni.router_replay.mode=R3",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        ],
    ),
}


def overrides_of(engine, folder):
    """The tiny recipe on a mixture of experts, its rollout by vLLM, which records the routes."""
    model = make_tiny_model("qwen3_moe", folder)
    return [
        *tiny_job(folder),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={STEPS}",
        "+padding=prompt",
        *ENGINES[engine][1],
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_plugin_reads_the_job_of_each_engine(engine, tmp_path):
    config = compose_job(*overrides_of(engine, tmp_path))
    padding = check_job(config)
    assert JobReader(config, padding).n_experts == 4
    assert JobReader(config, padding).configured_dp_sizes()["actor"] == 2
    assert config.actor_rollout_ref.actor.strategy == engine


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.skipif(find_spec("vllm") is None, reason="takes vLLM")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_trains_on_recorded_routes_with_pads_beside_them(engine, tmp_path):
    package = ENGINES[engine][0]
    if find_spec(package) is None:
        pytest.skip(f"takes {package}")
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment |= {"VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides_of(engine, tmp_path)]
    job = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
    assert job.returncode == 0, job.stdout[-5000:] + job.stderr[-5000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    assert sum(step["padding/pad_rows/total"] for step in steps) > 0, "no pad was met"
    for step in steps:
        assert [name for name, value in step.items() if not math.isfinite(value)] == []
        assert step["padding/actor/optimizer_steps/total"] == 4
        assert step["actor/grad_norm"] > 0
