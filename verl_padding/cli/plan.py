"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_padding.cli.batch_reader import read_batches
from verl_padding.cli.page import write_page
from verl_padding.cli.planned_batch import PlannedBatch, plan_file_batch
from verl_padding.doctor.job_config import as_a_job_would_start, compose_or_refuse
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR
from verl_padding.job.composition import JobArguments
from verl_padding.plan import Job
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.mini_batch_costs import MiniBatchCost
from verl_padding.plan.plural import plural

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
    settings = [each.lstrip("+") for each in arguments.overrides]
    # Settings of the padding alone, as +padding=fast, say nothing of a job.
    is_no_job = all(each.startswith("padding") for each in settings)
    is_no_job = is_no_job and replace(arguments, overrides=()) == JobArguments()
    if given or is_no_job:
        short = [f"{setting}={size}" for name, size in given.items() for setting in SIZES[name]]
        is_padded = any(each.startswith("+padding=") for each in arguments.overrides)
        flag = () if is_padded else ("+padding=prompt",)
        # The user's own overrides come last, and win.
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
        planned = [each.beside_stock() for each in planned] if compare else planned
    left_out = [f"left out: {refusal}" for refusal in refused]
    notes = Counter([*(note for batch in planned for note in plan_notes(batch)), *left_out])
    for note, count in notes.items():
        errors.print(note if count == 1 else f"{note} ({count} batches)", markup=False)
    if as_json:
        shown = _as_json(path, planned)
        sys.stdout.write(json.dumps(shown | ({"left_out": left_out} if left_out else {})) + "\n")
    else:
        _print_tables(path, planned)
    if page is not None:
        steps = [each.shown_step() for each in planned]
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


def _print_tables(path: Path, planned: Sequence[PlannedBatch]) -> None:
    console, job = Console(), planned[0].job
    if len(planned) > 1:
        name, heading = str(path), "file"
        steps_by_name = {Path(batch.batch.name).name: batch.planned.steps for batch in planned}
    else:
        name, heading = Path(planned[0].batch.name).name, "step"
        steps_by_name = {str(n): [step] for n, step in enumerate(planned[0].planned.steps)}
    ranks = plural(planned[0].update.dp_size, "rank")
    settings = f"strategy {job.strategy}, packer {job.packer}, sharing {job.sharing}"
    title = f"{name}: {ranks}, {settings}"
    by_micro = planned[0].planned.is_cut
    console.print(step_table(steps_by_name, heading=heading, title=title, by_micro=by_micro))
    seconds = sum(batch.seconds for batch in planned)
    console.print(f"Planning took {seconds:.2f} s.", highlight=False)
    if not by_micro:
        console.print(
            "Ranks are judged per optimizer step, since verl's packer cuts the micro-batches in "
            "the workers."
        )
    if planned[0].compared:
        title = f"{plural(len(planned), 'batch')}, stock verl and the plan"
        console.print(comparison_table(_totals(planned), title=title))


def _totals(planned: Sequence[PlannedBatch]) -> dict[str, dict[str, float]]:
    """Figures of each layout that is compared, over all batches."""
    row_cost = sum(int(batch.planned.costs.cost_R.sum()) for batch in planned)
    return {
        name: layout_totals(
            [step for batch in planned for step in batch.compared[name].steps], row_cost
        )
        for name in planned[0].compared
    }


def _as_json(path: Path, planned: Sequence[PlannedBatch]) -> dict[str, Any]:
    batches = []
    for batch in planned:
        layout = layout_as_json(batch.layout, batch.plan.figures[ACTOR], batch.batch.lines_R)
        layout["figures"]["plan_seconds"] = batch.seconds
        entry = {"file": batch.batch.name, **layout, "notes": list(plan_notes(batch))}
        batches.append(entry | _comparison([batch]))
    settings = {name: getattr(planned[0].job, name) for name in ("strategy", "packer", "sharing")}
    if not path.is_dir() and len(batches) == 1:
        return settings | batches[0]
    return settings | {"batches": batches} | _comparison(planned)


def _comparison(planned: Sequence[PlannedBatch]) -> dict[str, Any]:
    return {"comparison": _totals(planned)} if planned[0].compared else {}


def layout_totals(steps: Sequence[MiniBatchCost], row_cost: int = 0) -> dict[str, float]:
    """A layout of one batch or several in numbers, which docs/reference.md explains.

    Args:
        row_cost: of all real rows. With it, the time is also compared with a perfect one: that of
            ranks that never wait, and compute each real row and no pad.
    """
    ranks = steps[0].ranks
    # Where ranks wait for each other once a step, the slowest rank decides (mini); where they wait
    # at each micro-batch, the slowest of each (micro).
    cost = sum(step.cost for step in steps)
    mini = sum(step.mini_slowest for step in steps)
    micro = sum(step.micro_slowest for step in steps)
    totals = {
        "optimizer_steps": len(steps),
        "rows": sum(step.real_rows for step in steps),
        "pads": sum(step.pads for step in steps),
        "tokens": sum(step.real_tokens for step in steps),
        "pad_tokens": sum(step.tokens - step.real_tokens for step in steps),
        "computed_tokens": sum(step.computed_tokens for step in steps),
        "micro_batches": sum(step.micro_batches for step in steps),
        # Two ranks of cost 6 and 2: the slowest takes 1.5 times what the mean rank does.
        "imbalance": mini * ranks / cost,
        "micro_imbalance": micro * ranks / cost,
    }
    if row_cost:
        totals["over_perfect"] = mini * ranks / row_cost
        totals["micro_over_perfect"] = micro * ranks / row_cost
    return totals


def comparison_table(totals: Mapping[str, Mapping[str, float]], *, title: str) -> Table:
    """A line for each figure, a column for each layout."""
    table = Table("", title=title, title_justify="left")
    for name in totals:
        table.add_column(name, justify="right")
    for figure in next(iter(totals.values())):
        cells = [_shown(column[figure]) for column in totals.values()]
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
    all_steps = [step for steps in steps_by_name.values() for step in steps]
    totals = layout_totals(all_steps)
    columns = {
        "optimizer_steps": "steps",
        "rows": "rows",
        "pads": "pads",
        "tokens": "tokens\nof rows",
        "computed_tokens": "computed\ntokens",
    }
    if by_micro:
        columns |= {"micro_batches": "micro-\nbatches", "micro_imbalance": "slowest /\nmean rank"}
    else:
        columns["imbalance"] = "slowest /\nmean rank"
    if heading == "step":
        del columns["optimizer_steps"]
    if totals["computed_tokens"] == totals["tokens"]:
        del columns["computed_tokens"]
    if len(steps_by_name) > MAX_LINES:
        title += f"; the first {MAX_LINES} of {plural(len(steps_by_name), heading)}"
    table = Table(title=escape(title), title_justify="left", show_footer=True)
    table.add_column(heading, footer="all", justify="right", no_wrap=True)
    for figure, column in columns.items():
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=_shown(totals[figure]), justify="right", no_wrap=True)
    for name, steps in islice(steps_by_name.items(), MAX_LINES):
        of_name = layout_totals(steps)
        table.add_row(name, *[_shown(of_name[figure]) for figure in columns])
    return table


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.3f}"
