"""Settings that are missing, that verl does not read, or that do not go together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache

from omegaconf import DictConfig, OmegaConf

from verl_padding.config import PaddingConfig
from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.plan import Job
from verl_padding.verl_job.composition import JobArguments, compose_job
from verl_padding.verl_job.known_verl import KNOWN_VERL
from verl_padding.verl_job.roles_of_job import has_critic

ENGINE_OF_CRITIC = "the critic's engine does not read it, but +critic.<its engine's section>."

IGNORED = {
    "actor_rollout_ref.actor.use_prefix_grouper": (
        f"no engine of verl {KNOWN_VERL} reads it; padding.sharing=chains computes shared prefixes once"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": "verl's workers read ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "verl's workers read log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "verl's workers read log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": f"{ENGINE_OF_CRITIC}micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": f"{ENGINE_OF_CRITIC}micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": f"{ENGINE_OF_CRITIC}infer_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": f"{ENGINE_OF_CRITIC}infer_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "both passes of the critic read +critic.ppo_infer_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu": "both passes of the critic read +critic.ppo_infer_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "the critic's engine reads critic.fsdp.ulysses_sequence_parallel_size",
    "custom_reward_function.path": "verl.trainer.main_ppo reads reward.custom_reward_function.path",
    "reward_model.enable": "verl.trainer.main_ppo reads reward.reward_model.enable",
    "reward_model.reward_manager": "verl.trainer.main_ppo reads reward.reward_manager.name",
    "reward_model.num_workers": "verl.trainer.main_ppo reads reward.num_workers",
}
"""Setting -> what is read in its place. Told where a job sets it to another value than verl's own config does."""

USED: dict[str, Callable[[DictConfig], bool]] = {
    "reward.reward_model.": lambda config: bool(config.reward.reward_model.enable),
    "critic.": has_critic,
    "distillation.": lambda config: bool((config.get("distillation") or {}).get("enabled")),
}
"""Beginning of a setting -> whether the job reads what is below it; everything else is read."""


def refusal_of_hydra(error: Exception, arguments: JobArguments) -> str:
    """What to say where a config cannot be composed; for our own settings not what Hydra proposes, which fails too."""
    key = re.search(r"Could not override '(padding\.(\w+)[^']*)'", str(error))
    if key is None:
        told, _, _ = str(error).partition("Config search path:")  # places inside of packages, nobody's own
        return f"{type(error).__name__}: {' '.join(told.split())}"
    choices = [field.name for field in dataclasses.fields(PaddingConfig)]
    if key[2] not in choices:
        return f"{key[1]}: no such setting. Choices: padding.{', padding.'.join(choices)}."
    if not any(override.lstrip("+").startswith("padding=") for override in arguments.overrides):
        return f"{key[1]}: the job does not ask for padding. Add +padding=prompt."
    return f"{key[1]}: not in the config group. Write +{key[1]}."


def missing_settings(config: DictConfig) -> Iterator[Finding]:
    """Settings without a value (``???``) that the job reads."""
    for key in sorted(OmegaConf.missing_keys(config)):
        if all(used(config) for prefix, used in USED.items() if key.startswith(prefix)):
            yield wrong(key, "???: has to be set" + (f". {HINTS[key]}" if key in HINTS else "."))


HINTS = {"actor_rollout_ref.rollout.name": "vllm, for example; +local=cpu brings `transformers`."}


def ignored_settings(config: DictConfig) -> Iterator[Finding]:
    """Settings of the job that nobody reads."""
    verls = _verls_own()
    for key, instead in IGNORED.items():
        if not all(used(config) for prefix, used in USED.items() if key.startswith(prefix)):
            continue
        value = OmegaConf.select(config, key)
        if value != OmegaConf.select(verls, key):
            yield warning(key, f"{value}: has no effect: {instead}")


@cache
def _verls_own() -> DictConfig:
    return compose_job(JobArguments())


def lengths(config: DictConfig, job: Job) -> Iterator[Finding]:
    """Whether the longest row of the data settings fits into the token budget of each call."""
    data = config.data
    longest = data.max_prompt_length + data.max_response_length
    told = f"data.max_prompt_length + data.max_response_length = {longest}"
    budgets = {call.budget_setting: call.token_budget for _, call in job.calls() if call.token_budget is not None}
    for setting, budget in budgets.items():
        if budget < longest:
            yield warning(
                setting, f"{budget}: below {told}. A row that is longer than the budget ends the job. Raise it."
            )
    if budgets and min(budgets.values()) >= longest:
        yield ok("lengths", f"{told}, and every token budget is as large")
