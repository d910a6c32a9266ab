"""What the plug-in will do to the batches of a job, in words, before the job starts."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from omegaconf import DictConfig, OmegaConf

from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.job.job_reader import JobReader
from verl_padding.job.pad_length import row_multiple, why_row_multiple
from verl_padding.job.role_engine import RoleEngine
from verl_padding.plan import STRATEGIES, Job
from verl_padding.plan.counted import counted
from verl_padding.plan.planner import reuses_layout_of


def planned_job(reader: JobReader) -> Job:
    """The planner's job of a step that updates all that the job trains."""
    return reader.step_job(dp_sizes=reader.configured_dp_sizes(), updates_actor=True, seed=reader.padding.seed)


def summary(config: DictConfig, reader: JobReader, job: Job) -> Iterator[tuple[str, str]]:
    """(subject, description) of a job that can run."""
    yield (
        "strategy",
        f"{job.strategy}, {counted(job.prompts, 'prompt')} x {counted(job.sessions_per_prompt, 'session')} per batch",
    )
    engines = reader.engines
    for role, engine in engines.items():
        yield f"engine of the {role}", _told_of(engine, OmegaConf.select(config, engine.section))
    for name, update in job.updates.items():
        told = STRATEGIES[job.strategy].tell_steps(job, update)
        budget = f"{update.token_budget} tokens" if update.token_budget else counted(update.micro_batch_rows, "row")
        yield name, f"{told}, {counted(update.dp_size, 'data-parallel rank')}, micro-batches of at most {budget}"
    for name, inference in job.inference.items():
        taken = reuses_layout_of(job, inference)
        cut = "" if taken is None else f", micro-batches of the update of the {taken}"
        yield name, counted(inference.dp_size, "data-parallel rank") + cut
    if job.sharing != "off":
        yield "shared prefixes", "rows that extend each other are computed once"
    multiple = lcm(*(row_multiple(OmegaConf.select(config, engine.section)) for engine in engines.values()))
    why = ", the fewest that a pad has" if job.pad_tokens == MIN_PAD_LENGTH else ""
    why = why if multiple == 1 else f", since engines round rows up to multiples of {multiple}"
    explicit = reader.padding.pad_length
    why += "" if explicit == "auto" else f", as padding.pad_length={explicit} says"
    yield (
        "pads",
        f"{job.pad_tokens} tokens each{why}; the denominator of seq-mean losses is {reader.padding.denominator}",
    )


def _told_of(engine: RoleEngine, role: DictConfig) -> str:
    """Backend, ranks, parallel sizes, and what they ask of the plan, with the reason."""
    told = f"{engine.strategy}, {counted(engine.n_gpus, 'rank')}"
    if engine.shape:
        told += f": {engine.shape}, so {counted(engine.dp_size, 'data-parallel rank')}"
    if engine.micro_batch_multiple > 1:
        told += (
            f"; micro-batches in multiples of {engine.micro_batch_multiple}, for the virtual pipeline "
            f"({engine.why_micro_batch_multiple})"
        )
    if (multiple := row_multiple(role)) > 1:
        told += f"; rows rounded up to multiples of {multiple} tokens ({why_row_multiple(role)})"
    if engine.has_scheduler:
        told += "; Megatron's scheduler cuts the micro-batches of all ranks"
    return told
