"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import typer

from verl_padding.cli.batch_reader import Tokenize, read_batches
from verl_padding.cli.job_config import compose_or_refuse, quiet_imports
from verl_padding.cli.page import write_page
from verl_padding.cli.planned_batch import PlannedBatch, plan_file_batch
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR
from verl_padding.job.composition import JobArguments, as_recorded
from verl_padding.job.model_config import disable_remote_code_prompt
from verl_padding.plan import Job
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.plural import plural
from verl_padding.record.files import as_data_error
from verl_padding.record.run_files import CONFIG, ROLLOUTS, read_config
from verl_padding.record.step_file import FOLDER

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


def job_to_plan(path: Path, arguments: JobArguments, **sizes: int | None) -> Job:
    """The planner's job of a verl config, in which the options of :data:`SIZES` are set.

    Without a job's overrides, the config is that of the run in whose folder ``path`` is, as
    ``demo_out/steps/3.jsonl``, which is said on standard error, or else verl's with
    :data:`DEFAULTS` and ``+padding=fast``. A run's config is data: nothing that it names is run or
    fetched.
    """
    overrides = arguments.overrides
    short = [f"{setting}={size}" for name, size in sizes.items() if size for setting in SIZES[name]]
    # Settings of the padding alone, as +padding=fast, say nothing of a job.
    has_job = not all(each.lstrip("+").startswith("padding") for each in overrides)
    has_job = has_job or replace(arguments, overrides=()) != JobArguments()
    run_config = None if has_job else config_of_run(path)
    if run_config is None and not has_job:
        short += DEFAULTS
        if not any(each.startswith("+padding=") for each in overrides):
            short.append("+padding=fast")
    # The user's own overrides come last, and win.
    arguments = replace(arguments, overrides=(*short, *overrides))
    if run_config is None:
        return _planned_job(arguments)
    fix = "Give the overrides of the job after --"
    with as_data_error(str(run_config), "a job that can be planned", fix):
        job = _planned_job(as_recorded(arguments, read_config(run_config)))
    typer.echo(f"The job is that of {run_config}.", err=True)
    return job


def config_of_run(path: Path) -> Path | None:
    """The config of the run in whose folder a file is, or in whose folder of steps or rollouts;
    None if there is none."""
    folder = path.absolute().parent
    run = folder.parent if folder.name in (FOLDER, ROLLOUTS) else folder
    return run / CONFIG if (run / CONFIG).exists() else None


def _planned_job(arguments: JobArguments) -> Job:
    config = compose_or_refuse(arguments, finds_modules=False)
    with quiet_imports(finds_modules=False):
        from verl_padding.driver.job_check import check_job

        if config.get("padding") is None:
            raise PaddingConfigError("padding: the job does not ask for it. Add +padding=fast.")
        return check_job(config).planner_job()


def show_plan(
    path: Path, job: Job, *, tokenizer: str | None, compare: bool, as_json: bool, page: Path | None
) -> None:
    """Plans the rows of a file and prints the plans on standard output, notes on standard error.

    Args:
        job: planned with as many prompts as each batch has.
        tokenizer: Hugging Face name or folder, for the tokens of a rollout dump.
        page: file for the page of all batches.

    Raises:
        PaddingDataError: a file or an option is refused.
        PlanError: a batch cannot be planned.
    """
    tokenize = None if tokenizer is None else _load_tokenizer(tokenizer)
    # All before anything is printed: a refused command prints only its refusal.
    batches = read_batches(path, tokenize)
    planned = [plan_file_batch(batch, job, compare=compare) for batch in batches]
    # Once, where many batches have it.
    notes = list(dict.fromkeys(note for each in planned for note in plan_notes(each)))
    for note in notes:
        typer.echo(note, err=True)
    for each in planned:
        if as_json:
            typer.echo(json.dumps(_as_json(each)))
        else:
            _print_tables(each)
    if page is not None:
        steps = [each.shown_step() for each in planned]
        write_page(page, title=path.name, curves={}, steps=steps, notes=notes)
        typer.echo(f"The report is {page}.", err=True)


def _load_tokenizer(name: str) -> Tokenize:
    """By a tokenizer of Hugging Face, without code that comes with it."""
    from transformers import AutoTokenizer

    disable_remote_code_prompt()
    fix = "Name the folder of a model, or a model of the hub"
    with as_data_error(f"--tokenizer={name}", "a tokenizer that can be read", fix):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return partial(tokenizer.encode, add_special_tokens=False)


def plan_notes(planned: PlannedBatch) -> Iterator[str]:
    """What a user should know of a batch and its plan, a sentence or two each."""
    job, update, rows = planned.job, planned.job.updates[ACTOR], planned.batch.rows
    if job.sharing != "off" and rows.tries is None:
        yield "padding.sharing=on: nothing is shared. Give rows token_ids, or take recorded steps."
    prompts = len(set(rows.prompt_R))
    if job.prompts != prompts:
        yield (
            f"{update.mini_batch_setting}={update.prompts_per_mini_batch}: does not divide "
            f"{prompts} prompts with rows. They are planned as {job.prompts}, some without rows."
        )
    if rows.zero_advantage:
        tokens = sum(rows.tokens_R[row] for row in rows.zero_advantage) / sum(rows.tokens_R)
        share = f"{len(rows.zero_advantage)} of {plural(len(rows), 'row')}"
        yield f"{share}, {tokens:.1%} of the tokens, have an advantage of 0, or no trained token."
    yield from planned.plan.warnings
    if planned.plan.hint:
        yield planned.plan.hint


def _print_tables(planned: PlannedBatch) -> None:
    job, actor = planned.job, planned.layouts[ACTOR]
    settings = ", ".join(f"{name} {getattr(job, name)}" for name in SETTINGS)
    ranks = plural(actor.layout.dp_size, "rank")
    typer.echo(f"{Path(planned.batch.name).name}: {ranks}, {settings}")
    table = pandas.DataFrame(map(vars, actor.steps))
    table.loc["all"] = table.sum()
    table["imbalance"] = table[actor.time_of_a_step] * actor.layout.dp_size / table["cost"]
    shown = ["real_rows", "pads", "real_tokens", "computed_tokens", "micro_batches", "imbalance"]
    if actor.layout.cut_by == "verl":
        shown.remove("micro_batches")
    _print_table(table[shown])
    if comparison := planned.comparison():
        typer.echo("\nStock verl and the plan:")
        _print_table(pandas.DataFrame(comparison))


def _print_table(table: pandas.DataFrame) -> None:
    typer.echo(table.to_string(float_format=lambda number: f"{number:.3f}".removesuffix(".000")))


def _as_json(planned: PlannedBatch) -> dict[str, Any]:
    plan, batch = planned.plan, planned.batch
    shown = {name: getattr(planned.job, name) for name in SETTINGS} | {"file": batch.name}
    shown |= layout_as_json(plan.layouts[ACTOR], plan.figures[ACTOR], batch.lines_R)
    shown["notes"] = list(plan_notes(planned))
    if comparison := planned.comparison():
        shown["comparison"] = comparison
    return shown
