"""Settings: whether the config composes, what is missing in it, and what nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.known_verl import KNOWN_VERL
from verl_padding.job.roles_of_job import has_critic

_OF_CRITIC = "the critic's engine reads +critic.{engine}."
IGNORED = {
    "actor_rollout_ref.actor.use_prefix_grouper": (
        f"no engine of verl {KNOWN_VERL} reads it; padding.sharing=chains computes shared prefixes once"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": "verl's workers read ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "verl's workers read log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "verl's workers read log_prob_micro_batch_size_per_gpu",
    "data.truncation": "verl's v1 trainers cut no prompt; data.filter_overlong_prompts=true leaves out those too long",
    "critic.ppo_micro_batch_size": _OF_CRITIC + "micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": _OF_CRITIC + "micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": _OF_CRITIC + "infer_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": _OF_CRITIC + "infer_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "both passes of the critic read +critic.ppo_infer_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu": "both passes of the critic read +critic.ppo_infer_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "the critic's engine reads critic.fsdp.ulysses_sequence_parallel_size",
    "custom_reward_function.path": "verl.trainer.main_ppo reads reward.custom_reward_function.path",
    "reward_model.enable": "verl.trainer.main_ppo reads reward.reward_model.enable",
    "reward_model.reward_manager": "verl.trainer.main_ppo reads reward.reward_manager.name",
    "reward_model.num_workers": "verl.trainer.main_ppo reads reward.num_workers",
}
"""Setting -> what is read in its place. Reported where a job sets it to another value than verl's own config does."""


def settings_of_job(arguments: JobArguments, composed: list[DictConfig]) -> Iterator[Finding]:
    """Composes the job as ``verl.trainer.main_ppo`` would.

    Args:
        composed: gets the config, if the job has one whose mandatory settings are there.
    """
    try:
        config = compose_job(arguments)
    except Exception as error:
        yield wrong("overrides", f"{type(error).__name__}: {' '.join(str(error).split())}")
        return
    has_reward_model = config.reward.reward_model.enable
    missing = [key for key in OmegaConf.missing_keys(config) if has_reward_model or "reward_model." not in key]
    for key in sorted(missing):
        yield wrong(key, f"???: has to be set. Write {key}=..")
    if missing:
        return
    yield ok("mandatory settings", "all there")
    yield from _ignored(config)
    composed.append(config)


def _ignored(config: DictConfig) -> Iterator[Finding]:
    engine = config.critic.strategy.replace("fsdp2", "fsdp")
    for key, instead in IGNORED.items():
        value = OmegaConf.select(config, key)
        if value is None or (key.startswith("critic.") and not has_critic(config)):
            continue
        section, _, name = key.rpartition(".")
        is_own = not OmegaConf.is_interpolation(OmegaConf.select(config, section), name)
        # verl's own config, which takes a second to compose, is asked last.
        if is_own and value != OmegaConf.select(verls_own(), key):
            yield warning(key, f"{value}: has no effect: {instead.format(engine=engine)}")
    padding = config.get("padding")
    if isinstance(padding, DictConfig) and padding.get("timing_dir") and not padding.get("timing"):
        yield warning(
            "padding.timing_dir", f"{padding.timing_dir}: has no effect. Set padding.timing=true, or leave it out."
        )


@cache
def verls_own() -> DictConfig:
    """verl's config without any override."""
    return compose_job(JobArguments())
