"""Settings that are missing, that have no effect, or whose name is nearly one of verl's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache, partial

from hydra.errors import OverrideParseException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError

from verl_padding.config import PaddingConfig
from verl_padding.doctor.finding import Finding, warning, wrong
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.known_verl import KNOWN_VERL
from verl_padding.job.modes import MODE_PREFIX, STOCK_MODES
from verl_padding.job.roles_of_job import has_critic

OF_CRITIC = "the critic's engine reads +critic.{engine}."

IGNORED = {
    "actor_rollout_ref.actor.use_prefix_grouper": (
        f"no engine of verl {KNOWN_VERL} reads it; padding.sharing=chains computes shared prefixes once"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": "verl's workers read ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "verl's workers read log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "verl's workers read log_prob_micro_batch_size_per_gpu",
    "data.truncation": (
        "verl's v1 trainers cut no prompt. data.filter_overlong_prompts=true leaves out those that are too long"
    ),
    "critic.ppo_micro_batch_size": OF_CRITIC + "micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": OF_CRITIC + "micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": OF_CRITIC + "infer_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": OF_CRITIC + "infer_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "both passes of the critic read +critic.ppo_infer_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu": "both passes of the critic read +critic.ppo_infer_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "the critic's engine reads critic.fsdp.ulysses_sequence_parallel_size",
    "custom_reward_function.path": "verl.trainer.main_ppo reads reward.custom_reward_function.path",
    "reward_model.enable": "verl.trainer.main_ppo reads reward.reward_model.enable",
    "reward_model.reward_manager": "verl.trainer.main_ppo reads reward.reward_manager.name",
    "reward_model.num_workers": "verl.trainer.main_ppo reads reward.num_workers",
}
"""Setting -> what is read in its place. Told where a job sets it to another value than verl's own config does."""

ENGINE_SECTION = re.compile(r"(actor_rollout_ref\.(?:actor|ref)|critic)\.(megatron|veomni|torchtitan)\.")
"""Beginning of the settings of an engine that is not verl's default."""
WITHOUT_TIMING = "no file of laps is written. Set padding.timing=true, or leave it out"

SECTION_OF_ENGINE = {"fsdp2": "fsdp"}
"""Strategy of a critic -> section of its engine, where they differ."""


def _is_of_mode(config: DictConfig, mode: str) -> bool:
    return str(config.trainer.v1.trainer_mode).removeprefix(MODE_PREFIX) == mode


USED: dict[str, Callable[[DictConfig], bool]] = {
    "reward.reward_model.": lambda config: bool(config.reward.reward_model.enable),
    "critic.": has_critic,
    **{f"trainer.v1.{mode}.": partial(_is_of_mode, mode=mode) for mode in STOCK_MODES},
    "distillation.": lambda config: bool((config.get("distillation") or {}).get("enabled")),
}
"""Beginning of a setting -> whether the job reads what is below it; everything else is read."""


def refusal_of_hydra(error: Exception, arguments: JobArguments) -> str:
    """What to say where a config cannot be composed; for our own settings not what Hydra proposes, which fails too."""
    key = re.search(r"Could not override '(padding\.(\w+)[^']*)'", str(error))
    if key is None:
        told, _, _ = str(error).partition("Config search path:")  # places inside of packages, nobody's own
        unknown = re.search(r"Could not override '([^']+)'", told)
        if unknown and (meant := _likely_meant(unknown[1])):
            return f"{unknown[1]}: verl has no such setting. Did you mean {meant}?"
        if unknown and (of_engine := ENGINE_SECTION.match(unknown[1])):
            role, engine = of_engine.groups()
            said = " ".join((arguments.config_name, *arguments.overrides))
            if not re.search(rf"model_engine=\W*{engine}|local=cpu_{engine}|{engine}_trainer", said):
                return (
                    f"{unknown[1]}: of {engine}'s engine, and the job has the config of another one. Add "
                    f"model_engine={engine}, and {role}.strategy={engine} where the job sets that."
                )
        if isinstance(error, InterpolationToMissingValueError) and (missing := re.search(r"value: ([\w.]+)", told)):
            return f"{missing[1]}: ???, has to be set: other settings read it. Write {missing[1]}=.."
        for override in arguments.overrides:
            if isinstance(error, OverrideParseException) and re.match(r"[^=]+=\[?~", override):
                return f"{override}: Hydra takes no ~ for the home folder. Write the whole path, or $HOME."
        return f"{type(error).__name__}: {' '.join(told.split())}"
    choices = [field.name for field in dataclasses.fields(PaddingConfig)]
    if key[2] not in choices:
        return f"{key[1]}: no such setting. Choices: padding.{', padding.'.join(choices)}."
    if not any(override.lstrip("+").startswith("padding=") for override in arguments.overrides):
        return f"{key[1]}: the job does not ask for padding. Add +padding=prompt."
    return f"{key[1]}: not in the config group. Write +{key[1]}."


def missing_settings(config: DictConfig) -> Iterator[Finding]:
    """Sections that are not there, and settings without a value, ``???`` or null, that the job reads."""
    for section in SECTIONS:
        if not isinstance(OmegaConf.select(config, section), DictConfig):
            yield wrong(section, "there is no such section. Start from a config of verl.trainer.main_ppo.")
            return
    yield from _mistyped(config)
    needed = [key for key in (*NEEDED, *WHOLE_NUMBERS) if is_read(config, key)]
    unset = [key for key in needed if OmegaConf.select(config, key) is None]
    missing = [key for key in OmegaConf.missing_keys(config) if is_read(config, key)]
    for key in sorted({*unset, *missing}):
        value = "???" if key in missing else "null"
        yield wrong(key, f"{value}: has to be set" + (f". {HINTS[key]}" if key in HINTS else "."))


def _mistyped(config: DictConfig) -> Iterator[Finding]:
    """Settings whose value is no whole number where one is needed, or a text where verl's own value is a number."""
    for key in (*WHOLE_NUMBERS, *WHOLE_NUMBERS_OR_NULL):
        value = OmegaConf.select(config, key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            yield wrong(key, f"{value}: a whole number is needed.")
    for key, verls in _leaves(_verls_own()):
        is_number = isinstance(verls, int | float) and not isinstance(verls, bool)
        if is_number and key not in WHOLE_NUMBERS and is_read(config, key):
            value = OmegaConf.select(config, key)
            if isinstance(value, str):
                yield wrong(key, f"{value}: a number is needed; verl's own value is {verls}.")
    yield from _unknown_precisions(config)


def _unknown_precisions(config: DictConfig) -> Iterator[Finding]:
    """Settings of the trained roles that name a number format, and name none."""
    from verl.utils.torch_dtypes import PrecisionType

    for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        for key, value in _leaves(OmegaConf.select(config, section), f"{section}."):
            if not key.endswith("dtype") or not isinstance(value, str) or not is_read(config, key):
                continue
            try:
                PrecisionType.to_dtype(value)
            except RuntimeError:
                yield wrong(key, f"{value}: no format of numbers that verl knows. Choose fp32, bf16 or fp16.")


def _leaves(section: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(key, value) of each setting that holds a value of its own, and does not take over another's."""
    for name in map(str, section):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(section, name) or OmegaConf.is_interpolation(section, name):
            continue
        if isinstance(section[name], DictConfig):
            yield from _leaves(section[name], f"{key}.")
        else:
            yield key, section[name]


SECTIONS = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.model",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout.agent",
    "algorithm",
    "critic",
    "data",
    "reward.custom_reward_function",
    "reward.reward_manager",
    "reward.reward_model",
    "trainer.v1.sampler",
)
NEEDED = (
    "actor_rollout_ref.model.path",
    "algorithm.adv_estimator",
    "data.train_files",
    "data.val_files",
    "trainer.logger",
    "trainer.total_epochs",
    "trainer.v1.colocate_async.num_warmup_batches",
    "trainer.v1.separate_async.num_warmup_batches",
    "trainer.v1.separate_async.parameter_sync_step",
)
WHOLE_NUMBERS = (
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.n",
    "data.dataloader_num_workers",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "data.train_max_samples",
    "reward.num_workers",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.save_freq",
    "trainer.test_freq",
)
"""Sections and settings that verl.trainer.main_ppo does not do without."""
WHOLE_NUMBERS_OR_NULL = ("data.seed",)
HINTS = {
    "actor_rollout_ref.rollout.name": "vllm, for example; +local=cpu brings `transformers`.",
    "reward.reward_model.rollout.name": "vllm or sglang, the rollouts that serve reward models.",
    "data.val_files": "verl opens them even if it never validates: name the training files, or others.",
    "trainer.save_freq": "-1 for never.",
    "trainer.test_freq": "-1 for never.",
}


def is_read(config: DictConfig, key: str) -> bool:
    """Whether the job reads a setting, which may be of a part that it has not."""
    return all(used(config) for prefix, used in USED.items() if key.startswith(prefix))


def ignored_settings(config: DictConfig) -> Iterator[Finding]:
    """Settings of the job that nobody reads."""
    verls = _verls_own()
    engine = SECTION_OF_ENGINE.get(config.critic.strategy, config.critic.strategy)
    for key, instead in IGNORED.items():
        section, _, name = key.rpartition(".")
        parent = OmegaConf.select(config, section)
        # Not every engine's config has every setting.
        if not isinstance(parent, DictConfig) or name not in parent or OmegaConf.is_interpolation(parent, name):
            continue
        value = OmegaConf.select(config, key)
        if value is not None and is_read(config, key) and value != OmegaConf.select(verls, key):
            yield warning(key, f"{value}: has no effect: {instead.format(engine=engine)}")
    padding = config.get("padding")
    if isinstance(padding, DictConfig) and padding.get("timing_dir") and not padding.get("timing"):
        yield warning("padding.timing_dir", f"{padding.timing_dir}: has no effect: {WITHOUT_TIMING}")


NAME_YOURS = "Name yours; a config of your own has _self_ last in its list of defaults."
"""What to do about a value that only verl's own config has: perhaps it has replaced the user's."""


def is_verls_own(setting: str, value: str) -> bool:
    """Whether a setting has the value of verl's own config, so that most likely the job does not set it."""
    return bool(OmegaConf.select(_verls_own(), setting) == value)


def misspelt_settings(arguments: JobArguments) -> Iterator[Finding]:
    """Settings that the job adds with a +, and whose name is nearly one of verl's."""
    for override in arguments.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if override.startswith("+") and (meant := _likely_meant(key)):
            yield warning(key, f"{value}: verl has no such setting. Did you mean {meant}?")


def _likely_meant(key: str) -> str | None:
    """The setting beside a key whose name is nearly the same, if verl has not the key itself."""
    section, _, name = key.rpartition(".")
    beside = OmegaConf.select(_verls_own(), section) if section else None
    if not isinstance(beside, DictConfig) or name in beside or name in _fields_beside(beside):
        return None
    near = get_close_matches(name, map(str, beside), n=1, cutoff=0.85)
    return f"{section}.{near[0]}" if near else None


def _fields_beside(section: DictConfig) -> list[str]:
    """Those of verl's class of a section, of which some are not in its YAML."""
    target = get_class(section["_target_"]) if section.get("_target_") else None
    return [field.name for field in dataclasses.fields(target)] if dataclasses.is_dataclass(target) else []


@cache
def _verls_own() -> DictConfig:
    return compose_job(JobArguments())
