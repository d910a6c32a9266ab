"""Which jobs are refused before any worker starts, each with setting, value and fix."""

import pytest
from omegaconf import OmegaConf
from verl.utils.config import validate_config

from tests.support.verl_config import DYNAMIC, compose_job, compose_padded
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job.vendor import FOR_WORKERS, VARIABLE, VENDOR

A, GAE = "actor_rollout_ref.actor", "algorithm.adv_estimator=gae"


def job_of(*overrides):
    return check_job(compose_padded(*overrides)).planner_job()


SMALL_LCM = ["padding.strategy=lcm", f"{A}.ppo_mini_batch_size=2", "data.train_batch_size=16"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_batch_size=100", f"{A}.ppo_mini_batch_size=30"],
            rf"{A}.ppo_mini_batch_size=30 of 'actor' does not divide data.train_batch_size=100: ",
        ),
        (
            [f"{A}.strategy=megatron"],
            rf"{A}.strategy=megatron: the section's engine is a FSDPEngineConfig\. ",
        ),
        (
            ["model_engine=torchtitan"],
            rf"{A}.strategy=torchtitan: the section.s engine is a ",
        ),
        (
            ["trainer.v1.trainer_mode=async"],
            r"trainer.v1.trainer_mode='async': .* Choices: sync, colocate_async,",
        ),
        (
            [GAE, "+critic.fsdp.use_dynamic_bsz=false"],
            r"\+critic.fsdp.micro_batch_size_per_gpu=None: .*_bsz=False",
        ),
        (
            [f"{A}.loss_agg_mode=seq-mean-token-sum-norm"],
            rf"{A}.loss_scale_factor=None: .*Set it to a constant",
        ),
        (
            [f"{A}.ppo_max_token_len_per_gpu=null"],
            rf"{A}.ppo_max_token_len_per_gpu=None: .*use_dynamic_bsz",
        ),
        (SMALL_LCM, r"padding.strategy='lcm'.* = 2 rows, not a multiple of 8 "),
        (
            ["padding.pad_length=9", f"{A}.ppo_max_token_len_per_gpu=8"],
            r"padding.pad_length=9: a pad does not fit",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_setting_value_and_fix(overrides, message):
    with pytest.raises(PaddingConfigError, match=f"^{message}"):
        job_of(*overrides)


def test_a_section_that_workers_would_not_follow_is_refused(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    config = compose_job(*DYNAMIC)
    OmegaConf.update(config, "padding", {"strategy": "rows"}, force_add=True)
    for check in (check_job, lambda config: validate_config(config, False, False)):
        with pytest.raises(PaddingConfigError, match=VARIABLE):
            check(config)
    OmegaConf.update(config, FOR_WORKERS, VENDOR, force_add=True)
    assert check_job(config).padding.strategy == "rows"
