"""What the plug-in will do to the batches of a job, in words, before the job starts."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from verl_padding.job.job_reader import JobReader
from verl_padding.job.role_engine import PARALLEL_SIZES, RoleEngine
from verl_padding.plan import STRATEGIES, Job
from verl_padding.plan.counted import counted
from verl_padding.plan.planner import reuses_layout_of


def summary(reader: JobReader, job: Job) -> Iterator[tuple[str, str]]:
    """(subject, description) of a job that can run."""
    yield (
        "strategy",
        f"{job.strategy}, {counted(job.prompts, 'prompt')} x {counted(job.sessions_per_prompt, 'session')} per batch",
    )
    for role, engine in reader.engines.items():
        yield f"engine of the {role}", _describe(engine)
    for name, update in job.updates.items():
        steps = STRATEGIES[job.strategy].tell_steps(job, update)
        budget = f"{update.token_budget} tokens" if update.token_budget else counted(update.micro_batch_rows, "row")
        yield name, f"{steps}, {counted(update.dp_size, 'data-parallel rank')}, micro-batches of at most {budget}"
    for name, inference in job.inference.items():
        taken = reuses_layout_of(job, inference)
        cut = "" if taken is None else f", micro-batches of the update of the {taken}"
        yield name, counted(inference.dp_size, "data-parallel rank") + cut
    if job.sharing != "off":
        yield "shared prefixes", "rows that extend each other are computed once"
    multiple = lcm(*(engine.row_multiple for engine in reader.engines.values()))
    why = f", since engines round rows up to multiples of {multiple}" if multiple > 1 else ""
    yield (
        "pads",
        f"{job.pad_tokens} tokens each{why}; the denominator of seq-mean losses is {reader.padding.denominator}",
    )


def _describe(engine: RoleEngine) -> str:
    """Backend, ranks and parallel sizes: ``megatron, 8 ranks: tensor 2 x pipeline 2, so 2 data-parallel ranks``."""
    sizes = {word: engine.size(word) for word in PARALLEL_SIZES[engine.strategy]}
    shape = " x ".join(f"{word} {size}" for word, size in sizes.items() if size > 1)
    words = f"{engine.strategy}, {counted(engine.n_gpus, 'rank')}"
    return f"{words}: {shape}, so {counted(engine.dp_size, 'data-parallel rank')}" if shape else words
