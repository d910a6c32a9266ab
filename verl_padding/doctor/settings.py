"""Settings of a job: what is missing in them, and what nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.roles_of_job import has_critic

READ_INSTEAD = {
    "actor_rollout_ref.actor.use_prefix_grouper": "padding.sharing",
    "data.truncation": "data.filter_overlong_prompts",
    "critic.ppo_micro_batch_size_per_gpu": "+critic.{engine}.micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "+critic.{engine}.infer_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "+critic.ppo_infer_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu": "+critic.ppo_infer_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
}
"""Setting that verl's v1 trainers and workers pass over -> the one that does what it says. Reported where a job sets it
to another value than verl's own config does."""


def settings_of_job(config: DictConfig) -> Iterator[Finding]:
    """Mandatory settings that are missing, which are wrong, and settings without effect."""
    has_reward_model = config.reward.reward_model.enable
    missing = [key for key in OmegaConf.missing_keys(config) if has_reward_model or "reward_model." not in key]
    for key in sorted(missing):
        yield wrong(key, f"???: has to be set. Write {key}=..")
    if missing:
        return
    yield ok("mandatory settings", "all there")
    verls_own = compose_job(JobArguments())
    engine = config.critic.strategy.replace("fsdp2", "fsdp")
    for key, instead in READ_INSTEAD.items():
        value, (section, _, name) = OmegaConf.select(config, key), key.rpartition(".")
        is_own = value is not None and not OmegaConf.is_interpolation(OmegaConf.select(config, section), name)
        is_of_job = section != "critic" or has_critic(config)
        if is_own and is_of_job and value != OmegaConf.select(verls_own, key):
            yield warning(key, f"{value}: has no effect. Set {instead.format(engine=engine)} instead.")
