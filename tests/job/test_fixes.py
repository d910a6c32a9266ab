"""Whoever follows the fix of a refusal gets further: the same is not refused again."""

import re

import pytest

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError

A, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
CORRECTION, V1 = "algorithm.rollout_correction", "trainer.v1"
SKIP = "padding.zero_advantage_rows=skip"
NO_PASS = (
    "padding.recompute_old_log_probs=false",
    f"{R}.calculate_log_probs=false",
    "data.train_batch_size=8",
    f"{A}.ppo_mini_batch_size=8",
)
SHARING = ("padding.packer=plan", "padding.sharing=on")
REFUSED = [
    (SKIP, f"{A}.entropy_coeff=1"),
    (SKIP, f"{A}.use_kl_loss=true"),
    (SKIP, "distillation.enabled=true"),
    (SKIP, f"{A}.policy_loss.loss_mode=dro"),
    (SKIP, f"+{A}.policy_loss.rollout_correction.rollout_is_batch_normalize=true"),
    (*NO_PASS, f"{R}.calculate_log_probs=true"),
    (*NO_PASS, "algorithm.use_kl_in_reward=true"),
    (*NO_PASS, f"{A}.ppo_epochs=2"),
    (*NO_PASS, "padding.strategy=lcm"),
    (*NO_PASS, "algorithm.adv_estimator=optimal_token_baseline"),
    *((*NO_PASS, f"{CORRECTION}.{each}") for each in ("bypass_mode=true", "rollout_is=token")),
    ("padding.sharing=on",),
    (*SHARING, f"{M}.use_remove_padding=false"),
    (*SHARING, f"{A}.use_dynamic_bsz=false", f"{A}.ppo_micro_batch_size_per_gpu=1"),
    (f"{A}.ulysses_sequence_parallel_size=2", f"+{M}.override_config.attn_implementation=eager"),
    (f"{M}.lora_rank=8", "trainer.device=cpu"),
    ("padding.pad_length=7", "model_engine=megatron", f"{A}.megatron.context_parallel_size=2"),
    ("trainer.use_v1=false",),
    ("+async_training={}",),
    *(
        (f"{V1}.trainer_mode={mode}", f"++{V1}.{mode}.parameter_sync_step=4")
        for mode in ("sync", "colocate_async")
    ),
    ("padding.baseline=role", "algorithm.adv_estimator=gae", "critic.enable=true"),
    ("padding.baseline=role", "algorithm.adv_estimator=reinforce_plus_plus"),
    ("padding.strategy=promt",),
]
"""Overrides of jobs that are refused."""


def refusal_of(overrides):
    try:
        check_job(compose_job(*(f"{key}={value}" for key, value in overrides.items())))
    except PaddingConfigError as refusal:
        return str(refusal)
    return ""


def followed(refusal, overrides):
    """The overrides, changed by the first fix of a refusal."""
    setting = re.findall(r"([\w.]+)=\S+: ", refusal)[-1]
    fix = re.split(r"\. (?=[A-Z])", refusal)[-1].removesuffix(".")
    if fix.startswith("Leave it out"):
        return {key: value for key, value in overrides.items() if setting not in key}
    if found := re.match(r"Set ([\w.]+)=([\w.]+)|Set (?!it )([\w.]+) to (?!its)(\w+)", fix):
        setting, value = filter(None, found.groups())
    else:
        leads = r"Set it to |Choose one of |Choose |Did you mean |\S+: must be '"
        found = re.match(rf"(?:{leads})([\w.]+)", fix)
        assert found, refusal
        value = found[1]
    left = {key: old for key, old in overrides.items() if key.lstrip("+") != setting}
    return left | {f"++{setting}" if "." in setting else setting: value}


@pytest.mark.parametrize("job", REFUSED, ids=lambda job: job[-1])
def test_whoever_follows_a_fix_is_not_told_the_same_again(job):
    given = ("+padding=prompt", *DYNAMIC, *job)
    overrides = dict(each.split("=", 1) for each in given)
    refusal = refusal_of(overrides)
    assert refusal
    after = refusal_of(followed(refusal, overrides))
    assert not after, f"{refusal}\n -> {after}"
