"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_padding.cli.batch_reader import Tokenize, read_batches
from verl_padding.cli.job_config import compose_or_refuse, quiet_imports
from verl_padding.cli.page import write_page
from verl_padding.cli.planned_batch import PLAN, VERL, PlannedBatch, plan_file_batch
from verl_padding.errors import PaddingConfigError, PaddingDataError, PaddingError
from verl_padding.job.calls import ACTOR
from verl_padding.job.composition import JobArguments, as_recorded
from verl_padding.job.model_config import disable_remote_code_prompt
from verl_padding.plan import Job
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.mini_batch_costs import MiniBatchCost
from verl_padding.plan.plural import plural
from verl_padding.record.run_files import CONFIG, ROLLOUTS, read_config
from verl_padding.record.step_file import FOLDER

EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""verl's environment variable: modules that it imports."""

DEFAULTS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=true")
SIZES = {
    "dp": ("trainer.n_gpus_per_node",),
    "mini_batch": ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    "n": ("actor_rollout_ref.rollout.n",),
    "budget": ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu",),
}
"""Options of the command -> the settings of a job that they are short for."""
SETTINGS = ("strategy", "optimizer_steps", "packer", "sharing")
"""Fields of a job that are shown with its plans."""


def job_to_plan(
    path: Path, arguments: JobArguments, **sizes: int | None
) -> tuple[Job, Path | None]:
    """The planner's job of a verl config, in which the options of :data:`SIZES` are set; and the
    file of the config, if that is a run's.

    Without a job's overrides, the config is that of the run in whose folder ``path`` is, as
    ``demo_out/steps/3.jsonl``, or else verl's with :data:`DEFAULTS` and ``+padding=fast``. A run's
    config is data: nothing that it names is run or fetched.
    """
    overrides = arguments.overrides
    short = [f"{setting}={size}" for name, size in sizes.items() if size for setting in SIZES[name]]
    # Settings of the padding alone, as +padding=fast, say nothing of a job.
    has_job = not all(each.lstrip("+").startswith("padding") for each in overrides)
    has_job = has_job or replace(arguments, overrides=()) != JobArguments()
    run_config = None if has_job else config_of_run(path)
    if run_config is None and not has_job:
        is_padded = any(each.startswith("+padding=") for each in overrides)
        short += [*DEFAULTS, *([] if is_padded else ["+padding=fast"])]
    # The user's own overrides come last, and win.
    arguments = replace(arguments, overrides=(*short, *overrides))
    try:
        if run_config is not None:
            arguments = as_recorded(arguments, read_config(run_config))
        return _planned_job(arguments, has_job=has_job), run_config
    except Exception as error:  # of any kind, by what is in the file
        if run_config is None:
            raise
        why = str(error) if isinstance(error, PaddingError) else f"{type(error).__name__}: {error}"
        fix = "Give the overrides of the job after --"
        raise PaddingConfigError(f"{run_config}: {shorten(why, 500)} {fix}.") from error


def config_of_run(path: Path) -> Path | None:
    """The config of the run in whose folder a file is, or in whose folder of steps or rollouts;
    None if there is none."""
    folder = Path(os.path.abspath(path if path.is_dir() else path.parent))
    run = folder.parent if folder.name in (FOLDER, ROLLOUTS) else folder
    return run / CONFIG if (run / CONFIG).exists() else None


def _planned_job(arguments: JobArguments, *, has_job: bool) -> Job:
    # A plan needs no module of the job's but that of a trainer, which the environment names.
    finds_modules = has_job and EXTERNAL_MODULES in os.environ
    config = compose_or_refuse(arguments, finds_modules=finds_modules)
    with quiet_imports(finds_modules=finds_modules):
        from verl_padding.driver.job_check import check_job

        if config.get("padding") is None:
            raise PaddingConfigError("padding: the job does not ask for it. Add +padding=fast.")
        return check_job(config).planner_job()


def show_plan(
    path: Path,
    job: Job,
    *,
    run_config: Path | None = None,
    tokenizer: str | None,
    compare: bool,
    as_json: bool,
    page: Path | None,
) -> None:
    """Plans the rows of files and prints the plans on standard output, notes on standard error.

    Args:
        job: planned with as many prompts as each batch has.
        run_config: the config that it is from, if that is a run's.
        tokenizer: Hugging Face name or folder, for the tokens of a rollout dump.
        page: file for the page of all batches.

    Raises:
        PaddingDataError: a file or an option is refused.
        PlanError: a batch cannot be planned.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    tokenize = None if tokenizer is None else _load_tokenizer(tokenizer)
    with errors.status("planning"):
        # All before anything is printed: a refused command prints only its refusal.
        batches, refused = read_batches(path, tokenize)
        planned = [plan_file_batch(batch, job, compare=compare) for batch in batches]
    left_out = [f"left out: {refusal}" for refusal in refused]
    # Once, where many batches have it.
    notes = list(dict.fromkeys([note for each in planned for note in plan_notes(each)] + left_out))
    for note in [*([f"The job is that of {run_config}."] if run_config else []), *notes]:
        errors.print(note, markup=False)
    if as_json:
        shown = _as_json(path, planned)
        sys.stdout.write(json.dumps(shown | ({"left_out": left_out} if left_out else {})) + "\n")
    else:
        _print_tables(path, planned)
    if page is not None:
        steps = [each.shown_step() for each in planned]
        write_page(page, title=path.name, curves={}, steps=steps, notes=notes)
        errors.print(f"The page is in {page}.", markup=False)


def _load_tokenizer(name: str) -> Tokenize:
    """By a tokenizer of Hugging Face, without code that comes with it."""
    from transformers import AutoTokenizer

    disable_remote_code_prompt()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of any kind, by what is in the folder
        why = shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ..")
        fix = "Name the folder of a model, or a model of the hub"
        raise PaddingDataError(f"--tokenizer={name}: cannot be read ({why}). {fix}.") from error
    return partial(tokenizer.encode, add_special_tokens=False)


def plan_notes(planned: PlannedBatch) -> Iterator[str]:
    """What a user should know of a batch and its plan, a sentence or two each."""
    job, update, rows = planned.job, planned.job.updates[ACTOR], planned.batch.rows
    if job.sharing != "off" and rows.tries is None:
        yield "padding.sharing=on: nothing is shared. Give rows token_ids, or take recorded steps."
    if planned.batch.is_dump:
        yield "Lengths are estimates: a tokenizer has counted the texts of a rollout dump."
    prompts = len(set(rows.prompt_R))
    if job.prompts != prompts:
        yield (
            f"{update.mini_batch_setting}={update.prompts_per_mini_batch}: does not divide "
            f"{prompts} prompts with rows. They are planned as {job.prompts}, some without rows."
        )
    if rows.zero_advantage:
        tokens = sum(rows.tokens_R[row] for row in rows.zero_advantage) / sum(rows.tokens_R)
        share = (
            f"{len(rows.zero_advantage)} of {plural(len(rows), 'row')}, {tokens:.1%} of the tokens"
        )
        yield f"{share}, have an advantage of 0, or no trained token."
    yield from planned.plan.warnings
    if planned.plan.hint:
        yield planned.plan.hint


def _print_tables(path: Path, planned: Sequence[PlannedBatch]) -> None:
    console, job, actor = Console(), planned[0].job, planned[0].layouts[ACTOR]
    heading, steps_by_name = "step", {str(n): [step] for n, step in enumerate(actor.steps)}
    if len(planned) > 1:
        heading = "file"
        steps_by_name = {Path(each.batch.name).name: each.layouts[ACTOR].steps for each in planned}
    settings = ", ".join(f"{name.replace('_', ' ')} {getattr(job, name)}" for name in SETTINGS)
    title = f"{path.name}: {plural(job.updates[ACTOR].dp_size, 'rank')}, {settings}"
    console.print(step_table(steps_by_name, heading, title, by_micro=actor.by_micro))
    for totals in _comparison(planned).values():
        console.print(comparison_table(totals))


def _comparison(planned: Sequence[PlannedBatch]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of each layout that is compared, over all batches; nothing if none is."""
    row_cost = sum(int(each.layouts[ACTOR].costs.cost_R.sum()) for each in planned)
    totals = {}
    for name in [name for name in (VERL, PLAN) if name in planned[0].layouts]:
        layouts = [each.layouts[name] for each in planned]
        steps = [step for layout in layouts for step in layout.steps]
        totals[name] = layout_totals(steps, by_micro=layouts[0].by_micro, row_cost=row_cost)
    return {"comparison": totals} if totals else {}


def _as_json(path: Path, planned: Sequence[PlannedBatch]) -> dict[str, Any]:
    batches = []
    for each in planned:
        plan, notes = each.plan, list(plan_notes(each))
        layout = layout_as_json(plan.layouts[ACTOR], plan.figures[ACTOR], each.batch.lines_R)
        layout["figures"]["plan_seconds"] = each.seconds
        entry = {"file": each.batch.name, **layout, "notes": notes}
        batches.append(entry | _comparison([each]))
    settings = {name: getattr(planned[0].job, name) for name in SETTINGS}
    if not path.is_dir() and len(batches) == 1:
        return settings | batches[0]
    return settings | {"batches": batches} | _comparison(planned)


def layout_totals(
    steps: Sequence[MiniBatchCost], *, by_micro: bool, row_cost: int = 0
) -> dict[str, float]:
    """A layout of one batch or several in numbers, which docs/reference.md explains.

    Args:
        by_micro: ranks wait for each other at each micro-batch; False if once a step.
        row_cost: of all real rows. With it, the time is also compared with a perfect one: that of
            ranks that never wait, and compute each real row and no pad.
    """
    # Ranks that cost 4 + 2 and 1 + 3 in two micro-batches take 4 + 3 where they wait for each other
    # at each, and 6 where they do so once: 1.4 or 1.2 times the mean rank.
    slowest = sum(step.micro_slowest if by_micro else step.mini_slowest for step in steps)
    time = slowest * steps[0].ranks
    totals = {
        "optimizer_steps": len(steps),
        "rows": sum(step.real_rows for step in steps),
        "pads": sum(step.pads for step in steps),
        "tokens": sum(step.real_tokens for step in steps),
        "pad_tokens": sum(step.tokens - step.real_tokens for step in steps),
        "computed_tokens": sum(step.computed_tokens for step in steps),
        "micro_batches": sum(step.micro_batches for step in steps),
        "imbalance": time / sum(step.cost for step in steps),
    }
    return totals | ({"over_perfect": time / row_cost} if row_cost else {})


def comparison_table(totals: Mapping[str, Mapping[str, float]]) -> Table:
    """A line for each figure, a column for each layout."""
    figures = next(iter(totals.values()))
    lines = [
        [figure.replace("_", " "), *(_shown(column[figure]) for column in totals.values())]
        for figure in figures
    ]
    return _table("Stock verl and the plan", dict.fromkeys(["", *totals], ""), lines)


def step_table(
    steps_by_name: Mapping[str, Sequence[MiniBatchCost]],
    heading: str,
    title: str,
    *,
    by_micro: bool,
) -> Table:
    """A line for the steps of each name, and one for all steps.

    Args:
        heading: what a name is: a ``step``, or a ``file`` with some steps.
        by_micro: see :func:`layout_totals`.
    """
    all_steps = [step for steps in steps_by_name.values() for step in steps]
    totals = layout_totals(all_steps, by_micro=by_micro)
    columns = {"rows": "rows", "pads": "pads", "tokens": "tokens\nof rows"}
    if heading == "file":
        columns = {"optimizer_steps": "steps"} | columns
    if totals["computed_tokens"] < totals["tokens"]:
        columns["computed_tokens"] = "computed\ntokens"
    if by_micro:
        columns["micro_batches"] = "micro-\nbatches"
    columns["imbalance"] = "slowest /\nmean rank"
    lines = []
    for name, steps in steps_by_name.items():
        name_totals = layout_totals(steps, by_micro=by_micro)
        lines.append([name, *(_shown(name_totals[figure]) for figure in columns)])
    footers = {column: _shown(totals[figure]) for figure, column in columns.items()}
    return _table(title, {heading: "all"} | footers, lines)


def _table(title: str, footers: Mapping[str, str], lines: Iterable[Sequence[str]]) -> Table:
    """A table with these columns, each with its footer."""
    shown = any(footers.values())
    table = Table(title=escape(title), title_justify="left", show_footer=shown)
    for column, footer in footers.items():
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=footer, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.3f}"
