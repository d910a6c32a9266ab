"""What the plug-in will do to the batches of a job, in words, before the job starts."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.plan import STRATEGIES, Job
from verl_padding.plan.counted import counted
from verl_padding.verl_job.job_reader import JobReader, check_job


def planned_job(config: DictConfig, mode: str) -> Job:
    """The planner's job of a step that updates all that the job trains.

    Raises:
        PaddingConfigError: the job cannot run.
    """
    padding = check_job(config, mode)
    reader = JobReader(config, padding, mode)
    return reader.step_job(dp_sizes=reader.configured_dp_sizes(), updates_actor=True, seed=padding.seed)


def summary(config: DictConfig, job: Job) -> Iterator[tuple[str, str]]:
    """(subject, description) of a job that can run."""
    yield (
        "strategy",
        f"{job.strategy}, {counted(job.prompts, 'prompt')} x {counted(job.sessions_per_prompt, 'session')} per batch",
    )
    for name, update in job.updates.items():
        told = STRATEGIES[job.strategy].tell_steps(job, update)
        budget = f"{update.token_budget} tokens" if update.token_budget else counted(update.micro_batch_rows, "row")
        yield name, f"{told}, {counted(update.dp_size, 'data-parallel rank')}, micro-batches of at most {budget}"
    for name, inference in job.inference.items():
        yield name, counted(inference.dp_size, "data-parallel rank")
    if job.sharing != "off":
        yield "shared prefixes", "rows that extend each other are computed once"
    denominator = PaddingConfig.from_section(config.get("padding")).denominator
    yield "pads", f"{job.pad_tokens} tokens each; the denominator of seq-mean losses is {denominator}"
