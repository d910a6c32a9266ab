"""Settings: whether the config composes, what is missing in it, and what nobody reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache, partial

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl_padding.config import PaddingConfig
from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.known_verl import KNOWN_VERL
from verl_padding.job.modes import MODE_PREFIX, STOCK_MODES
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


def _is_of_mode(config: DictConfig, mode: str) -> bool:
    return str(config.trainer.v1.trainer_mode).removeprefix(MODE_PREFIX) == mode


USED: dict[str, Callable[[DictConfig], bool]] = {
    "reward.reward_model.": lambda config: bool(config.reward.reward_model.enable),
    "critic.": has_critic,
    **{f"trainer.v1.{mode}.": partial(_is_of_mode, mode=mode) for mode in STOCK_MODES},
    "data.truncation": lambda config: config.data.truncation != "error",
    "distillation.": lambda config: bool((config.get("distillation") or {}).get("enabled")),
}
"""Beginning of a setting -> whether the job reads what is below it; everything else is read."""


def settings_of_job(arguments: JobArguments, composed: list[DictConfig]) -> Iterator[Finding]:
    """Composes the job as ``verl.trainer.main_ppo`` would.

    Args:
        composed: gets the config, if the job has one whose mandatory settings are there.
    """
    try:
        config = compose_job(arguments)
    except Exception as error:
        yield wrong("overrides", refusal_of_hydra(error, arguments))
        return
    missing = [key for key in sorted(OmegaConf.missing_keys(config)) if _is_read(config, key)]
    for key in missing:
        yield wrong(key, f"???: has to be set. Write {key}=..")
    if missing:
        return
    yield ok("mandatory settings", "all there")
    yield from _ignored(config)
    yield from _misspelt(arguments)
    composed.append(config)


def refusal_of_hydra(error: Exception, arguments: JobArguments) -> str:
    """What to say where a config cannot be composed; for our own settings not what Hydra proposes, which fails too."""
    message, _, _ = str(error).partition("Config search path:")  # places inside of packages, nobody's own
    key = re.search(r"Could not override '(padding\.(\w+)[^']*)'", message)
    if key is None:
        unknown = re.search(r"Could not override '([^']+)'", message)
        if unknown and (meant := _likely_meant(unknown[1])):
            return f"{unknown[1]}: verl has no such setting. Did you mean {meant}?"
        return f"{type(error).__name__}: {' '.join(message.split())}"
    choices = [field.name for field in dataclasses.fields(PaddingConfig)]
    if key[2] not in choices:
        return f"{key[1]}: no such setting. Choices: padding.{', padding.'.join(choices)}."
    if not any(override.lstrip("+").startswith("padding=") for override in arguments.overrides):
        return f"{key[1]}: the job does not ask for padding. Add +padding=prompt."
    return f"{key[1]}: not in the config group. Write +{key[1]}."


def _is_read(config: DictConfig, key: str) -> bool:
    return all(used(config) for prefix, used in USED.items() if key.startswith(prefix))


def _ignored(config: DictConfig) -> Iterator[Finding]:
    engine = config.critic.strategy.replace("fsdp2", "fsdp")
    for key, instead in IGNORED.items():
        value = OmegaConf.select(config, key)
        section, _, name = key.rpartition(".")
        parent = OmegaConf.select(config, section)
        is_own = isinstance(parent, DictConfig) and not OmegaConf.is_interpolation(parent, name)
        # verl's own config, which takes a second to compose, is asked last.
        if is_own and value is not None and _is_read(config, key) and value != OmegaConf.select(verls_own(), key):
            yield warning(key, f"{value}: has no effect: {instead.format(engine=engine)}")
    padding = config.get("padding")
    if isinstance(padding, DictConfig) and padding.get("timing_dir") and not padding.get("timing"):
        yield warning(
            "padding.timing_dir", f"{padding.timing_dir}: has no effect. Set padding.timing=true, or leave it out."
        )


def _misspelt(arguments: JobArguments) -> Iterator[Finding]:
    """Settings that the job adds with a +, and whose name is nearly one of verl's."""
    for override in arguments.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if override.startswith("+") and (meant := _likely_meant(key)):
            yield warning(key, f"{value}: verl has no such setting. Did you mean {meant}?")


def _likely_meant(key: str) -> str | None:
    """The setting beside a key whose name is nearly the same, if verl has not the key itself."""
    section, _, name = key.rpartition(".")
    beside = OmegaConf.select(verls_own(), section) if section else None
    if not isinstance(beside, DictConfig) or name in beside:
        return None
    target = get_class(beside["_target_"]) if beside.get("_target_") else None
    if dataclasses.is_dataclass(target) and name in [field.name for field in dataclasses.fields(target)]:
        return None  # verl's class of a section has settings that its YAML has not
    near = get_close_matches(name, map(str, beside), n=1, cutoff=0.85)
    return f"{section}.{near[0]}" if near else None


@cache
def verls_own() -> DictConfig:
    """verl's config without any override."""
    return compose_job(JobArguments())
