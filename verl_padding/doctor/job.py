"""All that is checked in a job, the cheap things first."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.devices import devices_of_job
from verl_padding.doctor.files import MODEL, files_of_job
from verl_padding.doctor.finding import Check, Finding, not_checked, ok, warning, wrong
from verl_padding.doctor.packages import packages_of_job
from verl_padding.doctor.settings import settings_of_job
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.plan import Job

NOT_ASKED_FOR = ok("padding", "not asked for: verl trains as if the plug-in were not there. Add +padding=prompt.")
MODEL_LENGTH = "actor_rollout_ref.rollout.max_model_len"
"""Tokens of a prompt and its answer that the rollout allows; the model decides if it is null."""


def checks_of_job(arguments: JobArguments, platform: str) -> Iterator[Check]:
    """Composes the job as verl would, and finds what it lacks, and what the plug-in or verl would refuse.

    Args:
        platform: the value of VERL_PLATFORM that the job will have, "" for none.
    """
    try:
        config = compose_job(arguments)
    except (Exception, SystemExit) as error:  # a broken plug-in ends a process that asks for it
        settings = Check("settings", (wrong("overrides", f"{type(error).__name__}: {' '.join(str(error).split())}"),))
    else:
        settings = Check.run("settings", settings_of_job(config))
    yield settings
    if any(finding.verdict == "wrong" for finding in settings.findings):
        yield Check("job", (not_checked("the rest of the job", "the settings above come first"),))
        return
    yield Check.run("packages", packages_of_job(config))
    yield Check.run("devices", devices_of_job(config, platform))
    files = Check.run("files", files_of_job(config))
    yield files
    yield Check.run("plan", _plan(config))
    has_model = not any(finding.verdict == "wrong" and finding.subject == MODEL for finding in files.findings)
    yield Check.run("verl's own checks", _refusals_of_verl(config, has_model=has_model))


def _plan(config: DictConfig) -> Iterator[Finding]:
    """What the plug-in will do to the job's batches, or why it refuses."""
    from verl_padding.driver.advantages import check_advantages_stay_with_rows
    from verl_padding.driver.trainers import asks_for_padding, padded_trainer
    from verl_padding.errors import PaddingError
    from verl_padding.job.job_reader import check_job
    from verl_padding.job.summary import summary
    from verl_padding.plan.errors import PlanError

    mode = config.trainer.v1.trainer_mode
    try:
        if not asks_for_padding(config):
            yield NOT_ASKED_FOR
            return
        trainer = padded_trainer(mode)
        yield ok("trainer", f"{mode}, by {trainer.__name__}")
        reader = check_job(config, trainer.extends)
        check_advantages_stay_with_rows(config)
        job = reader.step_job()
        for subject, description in summary(reader, job):
            yield ok(subject, description)
        yield from _budgets(config, job)
    except (PaddingError, PlanError) as refusal:
        yield wrong("padding", str(refusal))


def _budgets(config: DictConfig, job: Job) -> Iterator[Finding]:
    """Whether the longest row that the settings allow fits into the token budget of each call."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    allowed = OmegaConf.select(config, MODEL_LENGTH)
    source = "data.max_prompt_length + data.max_response_length"
    if isinstance(allowed, int) and allowed < longest:
        longest, source = allowed, MODEL_LENGTH
    budgets = {call.budget_setting: call.token_budget for _, call in job.calls() if call.token_budget is not None}
    for setting, budget in budgets.items():
        if budget < longest:
            ranks = max(budget // int(OmegaConf.select(config, setting.lstrip("+")) or budget), 1)
            message = f"a budget of {budget} tokens is below {source} = {longest}, and a longer row would end the job"
            yield warning(setting, f"{budget // ranks}: {message}. Raise it to {-(-longest // ranks)}.")


def _refusals_of_verl(config: DictConfig, *, has_model: bool) -> Iterator[Finding]:
    """Without the actor's model, which is reported already, what loads it cannot be checked."""
    from verl_padding.entry.verl_refusals import CHECKS, verl_refusals

    refusals = dict(verl_refusals(config))
    for part in CHECKS:
        raised = refusals.get(part)
        if raised is None:
            yield ok(part, "passed")
        elif not has_model and "HFModelConfig" in str(raised):
            yield not_checked(part, "it loads a model that is not here")
        else:
            yield wrong(part, f"refuses the job: {type(raised).__name__}: {raised}")
