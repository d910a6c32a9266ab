"""What the plug-in will do to the batches of a job, in words, before the job starts."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_padding.plan import STRATEGIES
from verl_padding.plan.counted import counted
from verl_padding.verl_job.job_reader import JobReader, check_job
from verl_padding.verl_job.known_verl import KNOWN_VERL


def summary(config: DictConfig, mode: str) -> Iterator[tuple[str, str]]:
    """(subject, description) of a job that can run.

    Raises:
        PaddingConfigError: the job cannot run.
    """
    padding = check_job(config, mode)
    reader = JobReader(config, padding, mode)
    job = reader.step_job(dp_sizes=reader.configured_dp_sizes(), updates_actor=True, seed=padding.seed)
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
    if padding.sharing != "off":
        yield "shared prefixes", "rows that extend each other are computed once"
    if config.actor_rollout_ref.actor.get("use_prefix_grouper"):
        yield (
            "actor_rollout_ref.actor.use_prefix_grouper",
            f"True, but no engine of verl {KNOWN_VERL} reads it; padding.sharing=chains computes shared prefixes once",
        )
    yield "pads", f"{job.pad_tokens} tokens each; the denominator of seq-mean losses is {padding.denominator}"
