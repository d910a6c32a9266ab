"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_padding.cli.batch_reader import read_batches
from verl_padding.cli.job_config import as_a_job_would_start, compose_or_refuse
from verl_padding.cli.page import write_page
from verl_padding.cli.planned_batch import CutLayout, PlannedBatch, plan_file_batch
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR
from verl_padding.job.composition import JobArguments
from verl_padding.plan import Job
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.mini_batch_costs import MiniBatchCost
from verl_padding.plan.plural import plural

Compared = Mapping[str, CutLayout]

MAX_LINES = 20  # of a table
DEFAULTS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=true")
SIZES = {
    "dp": ("trainer.n_gpus_per_node",),
    "mini_batch": ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    "n": ("actor_rollout_ref.rollout.n",),
    "budget": ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu",),
}
"""Options of the command -> the settings of a job that they are short for."""


def job_to_plan(arguments: JobArguments, **sizes: int | None) -> Job:
    """The planner's job of a verl config, in which the options of :data:`SIZES` are set."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if given or arguments == JobArguments():
        short = [f"{setting}={size}" for name, size in given.items() for setting in SIZES[name]]
        is_padded = any(each.startswith("+padding=") for each in arguments.overrides)
        flag = () if is_padded else ("+padding=prompt",)
        overrides = (*flag, *DEFAULTS, *short, *arguments.overrides)
        arguments = replace(arguments, overrides=overrides)
    config = compose_or_refuse(arguments)
    with as_a_job_would_start():
        from verl_padding.driver.job_check import check_job
        from verl_padding.driver.trainers import asks_for_padding

        if not asks_for_padding(config):
            raise PaddingConfigError("padding: the job does not ask for it. Add +padding=prompt.")
        return check_job(config).step_job()


def show_plan(
    path: Path, job: Job, *, tokenizer: str | None, compare: bool, as_json: bool, page: Path | None
) -> None:
    """Plans the rows of files and prints the plans on standard output, notes on standard error.

    Args:
        job: planned with as many prompts as each batch has.
        tokenizer: Hugging Face name or folder, for the tokens of a rollout dump.
        page: file for the page of all batches.

    Raises:
        PaddingDataError: a file or an option is refused.
        PlanError: a batch cannot be planned.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    tokenize = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer)
        tokenize = lambda text: loaded.encode(text, add_special_tokens=False)  # noqa: E731
    with errors.status("planning"):
        find_shared = job.sharing != "off" or page is not None
        batches, refused = read_batches(path, tokenize, find_shared=find_shared)
        planned = [plan_file_batch(batch, job) for batch in batches]
        # Before anything is printed: a refused command prints only its refusal.
        compared = [each.compared() for each in planned] if compare else []
    left_out = [f"left out: {refusal}" for refusal in refused]
    notes = Counter([*(note for batch in planned for note in plan_notes(batch)), *left_out])
    for note, count in notes.items():
        errors.print(note if count == 1 else f"{note} ({count} batches)", markup=False)
    if as_json:
        shown = _as_json(path, planned, compared)
        sys.stdout.write(json.dumps(shown | ({"left_out": left_out} if left_out else {})) + "\n")
    else:
        _print_tables(path, planned, compared)
    if page is not None:
        steps = [
            each.shown_step(layouts)
            for each, layouts in zip(planned, compared or [{}] * len(planned), strict=True)
        ]
        write_page(page, title=path.name, curves={}, steps=steps, notes=list(notes))
        errors.print(f"The page is in {page}.", markup=False)


def plan_notes(planned: PlannedBatch) -> Iterator[str]:
    """What a user should know of a batch and its plan, a sentence or two each."""
    job, update, rows = planned.job, planned.update, planned.batch.rows
    if job.sharing != "off" and rows.forest is None:
        yield "padding.sharing=on: nothing is shared. Give rows token_ids, or take recorded steps."
    if planned.batch.is_dump:
        yield "The lengths are an estimate: the tokenizer's counts of a rollout dump's texts."
    prompts = len(set(rows.prompt_R))
    if job.prompts != prompts:
        yield (
            f"{update.mini_batch_setting}={update.prompts_per_mini_batch}: does not divide "
            f"{plural(prompts, 'prompt')} with rows. The batch is planned as one of "
            f"{plural(job.prompts, 'prompt')}, the others of which came back empty."
        )
    if rows.idle:
        tokens = sum(rows.tokens_R[row] for row in rows.idle) / sum(rows.tokens_R)
        share = f"{len(rows.idle)} of {plural(len(rows), 'row')}, {tokens:.1%} of the tokens"
        yield f"{share}, add nothing to the gradient."
    yield from planned.plan.warnings
    if planned.plan.hint:
        yield planned.plan.hint


def _print_tables(
    path: Path, planned: Sequence[PlannedBatch], compared: Sequence[Compared]
) -> None:
    console, job = Console(), planned[0].job
    if len(planned) > 1:
        name, heading = str(path), "file"
        steps_by_name = {Path(batch.batch.name).name: batch.planned.steps for batch in planned}
    else:
        name, heading = Path(planned[0].batch.name).name, "step"
        steps_by_name = {str(n): [step] for n, step in enumerate(planned[0].planned.steps)}
    ranks = plural(planned[0].update.dp_size, "rank")
    settings = f"strategy {job.strategy}, packer {job.packer}, sharing {job.sharing}"
    by_micro = planned[0].planned.is_cut
    title = f"{name}: {ranks}, {settings}"
    console.print(step_table(steps_by_name, heading=heading, title=title, by_micro=by_micro))
    seconds = sum(batch.seconds for batch in planned)
    console.print(f"Planning took {seconds:.2f} s.", highlight=False)
    if not by_micro:
        console.print(
            "Ranks are judged per optimizer step, since verl's packer cuts the micro-batches in "
            "the workers."
        )
    if compared:
        title = f"{plural(len(planned), 'batch')}, stock verl and the plan"
        console.print(comparison_table(_totals(planned, compared), title=title))


def _totals(
    planned: Sequence[PlannedBatch], compared: Sequence[Compared]
) -> dict[str, dict[str, float]]:
    row_cost = sum(int(batch.planned.costs.cost_R.sum()) for batch in planned)
    steps_by_name = {
        name: [step for layouts in compared for step in layouts[name].steps] for name in compared[0]
    }
    return {name: layout_totals(steps, row_cost) for name, steps in steps_by_name.items()}


def _as_json(
    path: Path, planned: Sequence[PlannedBatch], compared: Sequence[Compared]
) -> dict[str, Any]:
    batches = []
    for number, batch in enumerate(planned):
        layout = layout_as_json(batch.layout, batch.plan.figures[ACTOR], batch.batch.lines_R)
        layout["figures"]["plan_seconds"] = batch.seconds
        entry = {"file": batch.batch.name, **layout, "notes": list(plan_notes(batch))}
        if compared:
            entry["comparison"] = _totals([batch], [compared[number]])
        batches.append(entry)
    settings = {name: getattr(planned[0].job, name) for name in ("strategy", "packer", "sharing")}
    if not path.is_dir() and len(batches) == 1:
        return settings | batches[0]
    totals = {"comparison": _totals(planned, compared)} if compared else {}
    return settings | {"batches": batches} | totals


def layout_totals(steps: Sequence[MiniBatchCost], row_cost: int) -> dict[str, float]:
    """A layout of one batch or several in numbers, which docs/reference.md explains.

    "Perfect" is the time of ranks that never wait and compute each real row, at ``row_cost`` for
    all, and no pad.
    """
    ranks = steps[0].ranks
    cost = sum(step.cost for step in steps)
    mini = sum(step.mini_slowest for step in steps)
    micro = sum(step.micro_slowest for step in steps)
    return {
        "optimizer_steps": len(steps),
        "rows": sum(step.real_rows for step in steps),
        "pads": sum(step.pads for step in steps),
        "tokens": sum(step.real_tokens for step in steps),
        "pad_tokens": sum(step.tokens - step.real_tokens for step in steps),
        "computed_tokens": sum(step.computed_tokens for step in steps),
        "micro_batches": sum(step.micro_batches for step in steps),
        "imbalance": mini * ranks / cost,
        "micro_imbalance": micro * ranks / cost,
        "over_perfect": mini * ranks / row_cost,
        "micro_over_perfect": micro * ranks / row_cost,
    }


def comparison_table(totals: Mapping[str, Mapping[str, float]], *, title: str) -> Table:
    """A line for each figure, a column for each layout."""
    table = Table("", title=title, title_justify="left")
    for name in totals:
        table.add_column(name, justify="right")
    for figure in next(iter(totals.values())):
        numbers = [column[figure] for column in totals.values()]
        cells = [f"{each:,}" if isinstance(each, int) else f"{each:.3f}" for each in numbers]
        table.add_row(figure.replace("_", " "), *cells)
    return table


def step_table(
    steps_by_name: Mapping[str, Sequence[MiniBatchCost]],
    *,
    heading: str,
    title: str,
    by_micro: bool,
) -> Table:
    """A line for the steps of each name, the first ones if there are many, and one for all steps.

    Args:
        heading: what a name is: a ``step``, or a ``file`` with some steps.
        by_micro: ranks wait for each other at each micro-batch; False if the workers cut them, then
            once per step.
    """
    every = [step for steps in steps_by_name.values() for step in steps]
    shown = _cells(every, by_micro)
    if heading == "step":
        del shown["steps"]
    if all(step.computed_tokens == step.real_tokens for step in every):
        del shown["computed\ntokens"]
    if len(steps_by_name) > MAX_LINES:
        title += f"; the first {MAX_LINES} of {plural(len(steps_by_name), heading)}"
    table = Table(title=escape(title), title_justify="left", show_footer=True)
    table.add_column(heading, footer="all", justify="right", no_wrap=True)
    for column, cell in shown.items():
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=cell, justify="right", no_wrap=True)
    for name, steps in list(steps_by_name.items())[:MAX_LINES]:
        cells = _cells(steps, by_micro)
        table.add_row(name, *[cells[column] for column in shown])
    return table


def _cells(steps: Sequence[MiniBatchCost], by_micro: bool) -> dict[str, str]:
    slowest = sum(step.micro_slowest if by_micro else step.mini_slowest for step in steps)
    bound = sum(step.micro_bound if by_micro else step.mini_bound for step in steps)
    cost = sum(step.cost for step in steps)
    cells = {
        "steps": f"{len(steps):,}",
        "rows": f"{sum(step.real_rows for step in steps):,}",
        "pads": f"{sum(step.pads for step in steps):,}",
        "tokens\nof rows": f"{sum(step.real_tokens for step in steps):,}",
        "computed\ntokens": f"{sum(step.computed_tokens for step in steps):,}",
        "micro-\nbatches": f"{sum(step.micro_batches for step in steps):,}",
        "slowest /\nmean rank": f"{slowest * steps[0].ranks / cost:.3f}",
        "over lower\nbound": f"{slowest / max(bound, 1):.3f}",
    }
    if not by_micro:
        del cells["micro-\nbatches"]
    return cells
