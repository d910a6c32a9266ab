"""What is said where Hydra refuses a job's overrides."""

import pytest

from verl_padding.cli.job_config import compose_or_refuse
from verl_padding.errors import PaddingConfigError
from verl_padding.job.composition import JobArguments

FLAG = "+padding=prompt"
FSDP_OF_MEGATRON = "actor_rollout_ref.actor.fsdp_config.param_offload=true"


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ((FLAG, "padding.weigthing=session"), "padding.weighting"),
        (("padding.strategy=rows",), r"\+padding=fast"),
        (("padding=rows",), r"\+padding=rows"),
        (("+padding=true",), r"\+padding=fast"),
        (("++padding=fast",), "force-add"),
        ((FLAG, "+padding=fast"), "Multiple values for padding.* Choose one of a group"),
        (("data.max_prompt_lenght=64",), "data.max_prompt_length"),
        (("ppo_mini_batch_size=4",), "actor_rollout_ref.actor.ppo_mini_batch_size"),
        (("+padding=fst",), "lcm"),
        (("model_engine=megatron", FSDP_OF_MEGATRON), "no such key"),
    ],
)
def test_an_override_that_hydra_refuses_is_shown_with_what_was_meant(overrides, meant):
    with pytest.raises(PaddingConfigError, match=meant) as refusal:
        compose_or_refuse(JobArguments(overrides=overrides))
    assert overrides[-1].partition("=")[0].lstrip("+") in str(refusal.value)
    assert "To append" not in str(refusal.value)
