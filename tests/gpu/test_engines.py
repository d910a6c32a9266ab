"""verl's GPU engines, with routes that vLLM has recorded: run with ``pytest -m gpu`` on a node of two GPUs."""

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
from verl_padding.recipes.context_reset.job import tiny_job

# The recipe's schedule is FSDP's: other engines' optimizers have other settings for theirs.
NO_SCHEDULE = [f"~actor_rollout_ref.actor.optim.{name}" for name in ("lr_scheduler_type", "min_lr_ratio")]
# The engine, the module that it takes, and what has it replay the routes of the rollout.
ENGINES = {
    "fsdp2": ("flash_attn", ["actor_rollout_ref.actor.strategy=fsdp2"]),
    "megatron": (
        "megatron.bridge",
        [
            "model_engine=megatron",
            *NO_SCHEDULE,
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
        ],
    ),
    "veomni": (
        "veomni",
        [
            "model_engine=veomni",
            *NO_SCHEDULE,
            "actor_rollout_ref.actor.veomni.router_replay.mode=R3",
        ],
    ),
}


def overrides_of(engine, folder):
    """The tiny recipe on a mixture of experts, its rollout by vLLM, which records the routes."""
    model = make_tiny_model("qwen3_moe", folder)
    return [
        *tiny_job(folder),
        *ON_GPUS,
        *RECORDED_ROUTES,
        f"actor_rollout_ref.model.path={model}",
        "trainer.n_gpus_per_node=2",
        "+padding=prompt",
        *ENGINES[engine][1],
        *DYNAMIC,
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_plugin_reads_the_job_of_each_engine(engine, tmp_path):
    config = compose_job(*overrides_of(engine, tmp_path))
    padding = check_job(config).padding
    assert JobReader(config, padding).n_experts == 4
    assert JobReader(config, padding).configured_dp_sizes()["actor"] == 2
    assert config.actor_rollout_ref.actor.strategy == engine


@pytest.mark.parametrize("engine", [pytest.param(engine, marks=needs_gpus(2)) for engine in ENGINES])
def test_the_engine_trains_on_recorded_routes_with_pads_beside_them(engine, tmp_path):
    skip_without(ENGINES[engine][0])
    for step in train_on_gpus(overrides_of(engine, tmp_path), tmp_path):
        assert step["padding/actor/optimizer_steps/total"] == 4
        assert step[ROUTES_FOUND] == 1
