"""The config and the model of a dry run: small, and the user's in all else."""

import pytest
import torch
from omegaconf import OmegaConf
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.support.verl_config import DYNAMIC
from verl_padding.driver.job_check import check_job
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.on_cpu.reduced_job import reduced, shrunk


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "llama", "gemma3_text", "deepseek_v3"])
def test_a_shrunk_config_makes_a_small_model_of_its_family(family):
    large = CONFIG_MAPPING[family]().to_dict()
    small = shrunk(large)
    assert small.keys() <= large.keys()
    assert small["vocab_size"] == large["vocab_size"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    layers = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    assert 0 < layers < 1_000_000


@pytest.mark.parametrize("rotated", [1.0, 0.75])
def test_a_shrunk_model_with_longrope_has_plain_rope(rotated):
    """Phi-3's LongRoPE, and Phi-4-mini's, which rotates three quarters of a head."""
    factors = [1.0] * int(96 * rotated / 2)
    rope = {"rope_type": "longrope", "long_factor": factors, "short_factor": factors}
    of_model = {"rope_scaling": rope | {"rope_theta": 1e4}, "partial_rotary_factor": rotated}
    small = shrunk(CONFIG_MAPPING["phi3"](**of_model).to_dict())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    assert model(input_ids=torch.ones(1, 7, dtype=torch.long)).logits.isfinite().all()


def test_a_reduced_job_keeps_the_algorithm_and_writes_no_file_of_the_user(own, tmp_path):
    mine = [
        *DYNAMIC,
        "model_engine=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.model.lora.rank=8",
        "actor_rollout_ref.actor.clip_ratio=0.3",
        "padding.strategy=rows",
        "trainer.logger=[console,wandb]",
        "trainer.default_local_dir=/mine/checkpoints",
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    job = [each for each in own.overrides(*mine) if each != "+local=cpu"]
    config = compose_job(JobArguments(overrides=tuple(job)))
    before = OmegaConf.to_yaml(config)
    small, left_out = reduced(config, folder=tmp_path, attention="sdpa")
    check_job(small)
    assert OmegaConf.to_yaml(config) == before
    assert (small.actor_rollout_ref.actor.clip_ratio, small.padding.strategy) == (0.3, "rows")
    assert (small.actor_rollout_ref.actor.strategy, small.trainer.nnodes) == ("fsdp2", 1)
    assert small.actor_rollout_ref.model.lora_rank == 8, "which is another setting of Megatron's"
    assert "/mine" not in OmegaConf.to_yaml(small)
    assert [each for each in ("megatron", "vllm") if each not in " ".join(left_out)] == []


def test_a_reduced_job_has_no_servers(own, tmp_path):
    job = ["reward.reward_model.enable=true", "critic.model.path=/another/model"]
    config = compose_job(JobArguments(overrides=tuple(own.overrides(*job))))
    small, left_out = reduced(config, folder=tmp_path, attention="sdpa")
    assert not small.reward.reward_model.enable
    assert [each for each in ("reward_model", "critic") if each not in " ".join(left_out)] == []
