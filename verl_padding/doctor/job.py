"""All that is looked at in a job, the cheap things first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from omegaconf import DictConfig

from verl_padding.doctor.agent_loops import agent_loops_of_job, loops_of_job
from verl_padding.doctor.code import code_of_job
from verl_padding.doctor.data_files import Needs, data_files_of_job
from verl_padding.doctor.devices import devices_of_job
from verl_padding.doctor.environment import variables_of_job
from verl_padding.doctor.extra_info import extra_info_of_job
from verl_padding.doctor.finding import Finding, Look, not_looked_at, ok, wrong
from verl_padding.doctor.folders import folder_of_hydra, folders_of_job, paths_from_hydras_folder
from verl_padding.doctor.interfaces import interfaces_of_job
from verl_padding.doctor.loaded_model import SETTINGS_OF_PATHS, LoadedModel, loaded_model, model_of_job
from verl_padding.doctor.models import models_of_job
from verl_padding.doctor.null_rows import null_rows_of_job
from verl_padding.doctor.own_files import own_files_of_job
from verl_padding.doctor.packages import packages_of_job
from verl_padding.doctor.passed_on import values_for_rollout, values_passed_on
from verl_padding.doctor.penalties import penalties_of_job
from verl_padding.doctor.prompts import prompts_of_job
from verl_padding.doctor.rewards import read_by_verl, rewards_of_job
from verl_padding.doctor.settings import (
    ignored_settings,
    missing_settings,
    misspelt_settings,
    refusal_of_hydra,
)
from verl_padding.doctor.token_budgets import longest_rows
from verl_padding.doctor.tools import tools_of_job
from verl_padding.doctor.value_heads import CRITIC, value_head_of_job
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.role_engine import first_words, settings_named

OF_MODEL = ("HFModelConfig", "Make sure the last char in src is not /")
"""Words of verl's refusals that are about the path of a model."""
NOT_ASKED_FOR = ok("padding", "not asked for: verl trains as if the plug-in were not there. Add +padding=prompt.")


def looks_at_job(arguments: JobArguments, platform: str) -> Iterator[Look]:
    """Composes the job as verl would, and finds what it lacks, and what the plug-in or verl would refuse.

    Args:
        platform: the value of VERL_PLATFORM that the job will have, "" for none.
    """
    composed: list[DictConfig] = []
    settings = Look.at("settings", lambda: _compose(arguments, composed))
    yield settings
    if any(finding.verdict == "wrong" for finding in settings.findings):
        rest = "the rest of the job"
        yield Look(title="job", findings=(not_looked_at(rest, "the settings above come first"),))
        return
    (config,) = composed
    yield Look.at("packages", lambda: chain(packages_of_job(config), values_for_rollout(config)))
    yield Look.at("environment", lambda: chain(variables_of_job(config), interfaces_of_job(config)))
    yield Look.at("devices", lambda: devices_of_job(config, platform))
    files = look_at_files(config)
    yield files
    yield Look.at("plan", lambda: _plan(config))
    told = any(finding.verdict == "wrong" and finding.subject.endswith("model.path") for finding in files.findings)
    yield Look.at("verl's own checks", lambda: _refusals_of_verl(config, without_model=told))
    yield look_at_first_step(config, files)


def look_at_files(config: DictConfig) -> Look:
    """Whether the job's models, data and code are there."""
    return Look.at("files", lambda: _files(config))


def look_at_first_step(config: DictConfig, files: Look) -> Look:
    """What is in the files, taken as far as a job goes before it trains: the costliest look.

    Args:
        files: what was found of the files themselves.
    """
    told = [finding.subject for finding in files.findings if finding.verdict == "wrong"]
    without_model = any(subject in SETTINGS_OF_PATHS for subject in told)
    without_data = any(subject.startswith("data.") for subject in told)
    return Look.at(
        "first step",
        lambda: chain(
            _first_step(config, without_model=without_model, without_data=without_data),
            () if CRITIC in told else value_head_of_job(config),
        ),
    )


def _compose(arguments: JobArguments, composed: list[DictConfig]) -> Iterator[Finding]:
    try:
        config = compose_job(arguments)
    except Exception as error:
        yield wrong("overrides", refusal_of_hydra(error, arguments))
        return
    missing = list(missing_settings(config))
    yield from missing
    if missing:
        return
    yield ok("mandatory settings", "all there")
    yield from penalties_of_job(config)
    yield from ignored_settings(config)
    yield from misspelt_settings(arguments)
    yield from values_passed_on(config)
    yield from folder_of_hydra(arguments)
    yield from paths_from_hydras_folder(arguments, config)
    composed.append(config)


def _files(config: DictConfig) -> Iterator[Finding]:
    yield from models_of_job(config)
    loops = loops_of_job(config)
    own_manager = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    asked = bool(loops) and not own_manager and all(loop.leaves_rewards() for loop in loops)
    needs = Needs(messages=bool(loops) and all(loop.is_verls for loop in loops), rewards=asked and read_by_verl(config))
    yield from data_files_of_job(config, needs)
    yield from null_rows_of_job(config, needs)
    yield from code_of_job(config)
    yield from rewards_of_job(config, asked=asked)
    yield from extra_info_of_job(config, loops, asked=asked)
    yield from tools_of_job(config)
    yield from agent_loops_of_job(config)
    yield from own_files_of_job(config)
    yield from folders_of_job(config)


def _first_step(config: DictConfig, *, without_model: bool, without_data: bool) -> Iterator[Finding]:
    """
    Args:
        without_model: the actor's model is not there or broken, which is told already.
        without_data: the same of the prompts.
    """
    loaded: list[LoadedModel] = []
    if without_model:
        yield not_looked_at("model and prompts", "the model above comes first")
    else:
        yield from loaded_model(config, loaded)
    for model in loaded:
        yield from model_of_job(config, model)
        if without_data:
            yield not_looked_at("prompts", "the files above come first")
        else:
            yield from prompts_of_job(config, model, loops_of_job(config))


def _plan(config: DictConfig) -> Iterator[Finding]:
    """What the plug-in will do to the job's batches, or why it refuses."""
    from verl_padding.driver.trainers import asks_for_padding, padded_trainer
    from verl_padding.driver.tried_advantages import refuse_mispaired_advantages
    from verl_padding.errors import PaddingError
    from verl_padding.job.summary import planned_job, summary
    from verl_padding.plan.errors import PlanError

    mode = config.trainer.v1.trainer_mode
    try:
        if not asks_for_padding(config):
            yield ok("trainer", mode)
            yield NOT_ASKED_FOR
            yield not_looked_at("lengths", "verl's budgets are read for a plan, and the job has none")
            return
        trainer = padded_trainer(mode)
        yield ok("trainer", f"{mode}, by {trainer.__name__}")
        job = planned_job(config, trainer.extends)
        refuse_mispaired_advantages(config)
        for subject, told in summary(config, job):
            yield ok(subject, told)
        yield from longest_rows(config, job)
    except (PaddingError, PlanError) as refusal:
        yield wrong("padding", str(refusal))


def _refusals_of_verl(config: DictConfig, *, without_model: bool) -> Iterator[Finding]:
    """
    Args:
        without_model: a model cannot be loaded, which is told already.
    """
    from verl_padding.entry.verl_refusals import CALLS, verl_refusals

    refusals = dict(verl_refusals(config))
    for part in CALLS:
        raised = refusals.get(part)
        if without_model and any(words in str(raised) for words in OF_MODEL):
            yield not_looked_at(part, "it loads a model that is not here")
        elif raised is not None:
            named = settings_named(config, raised, first_words(raised.__cause__ or raised))
            fix = f". Correct {named}." if named else ""
            yield wrong(part, f"refuses the job: {type(raised).__name__}: {_in_full(raised)}{fix}")
        else:
            yield ok(part, "passed")


def _in_full(raised: BaseException) -> str:
    """What an exception says, and what its cause does where that is not said already."""
    cause = first_words(raised.__cause__ or raised)
    return str(raised) if cause in str(raised) else f"{raised} ({cause})"
