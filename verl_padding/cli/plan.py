"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path

import pandas
import typer

from verl_padding.cli.batch_reader import Tokenize, read_batches
from verl_padding.cli.job_config import compose_or_refuse, quiet_imports
from verl_padding.errors import PaddingConfigError, plural
from verl_padding.job.calls import ACTOR
from verl_padding.job.composition import JobArguments
from verl_padding.job.model_config import disable_remote_code_prompt
from verl_padding.plan import BatchPlan, Job, Rows, plan_batch
from verl_padding.plan.call_costs import mini_batch_costs
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.planner import costs_of
from verl_padding.record.files import as_data_error

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


def job_to_plan(arguments: JobArguments, **sizes: int | None) -> Job:
    """The planner's job of a verl config, in which the options of :data:`SIZES` are set; without a
    job's overrides, verl's with :data:`DEFAULTS` and ``+padding=fast``."""
    overrides = arguments.overrides
    short = [f"{setting}={size}" for name, size in sizes.items() if size for setting in SIZES[name]]
    # Settings of the padding alone, as +padding=fast, say nothing of a job.
    has_job = not all(each.lstrip("+").startswith("padding") for each in overrides)
    if not has_job and replace(arguments, overrides=()) == JobArguments():
        short += DEFAULTS
        if not any(each.startswith("+padding=") for each in overrides):
            short.append("+padding=fast")
    # The user's own overrides come last, and win.
    arguments = replace(arguments, overrides=(*short, *overrides))
    config = compose_or_refuse(arguments, finds_modules=False)
    with quiet_imports(finds_modules=False):
        from verl_padding.driver.job_check import check_job

        if config.get("padding") is None:
            raise PaddingConfigError("padding: the job does not ask for it. Add +padding=fast.")
        return check_job(config).planner_job()


def show_plan(path: Path, job: Job, *, tokenizer: str | None) -> None:
    """Plans the rows of a file and prints the plans on standard output, notes on standard error.

    Args:
        job: planned with as many prompts as each batch has.
        tokenizer: Hugging Face name or folder, for the tokens of a rollout dump.

    Raises:
        PaddingDataError: a file or an option is refused.
        PlanError: a batch cannot be planned.
    """
    tokenize = None if tokenizer is None else _load_tokenizer(tokenizer)
    # All before anything is printed: a refused command prints only its refusal.
    # 15 prompts with mini-batches of 4 are planned as 16, one of which has no rows.
    multiple = lcm(*(update.prompts_per_mini_batch for update in job.updates.values()))
    planned: list[tuple[str, Rows, Job, BatchPlan]] = []
    for name, rows in read_batches(path, tokenize):
        own = replace(job, prompts=up_to_multiple(len(set(rows.prompt_R)), multiple))
        planned.append((name, rows, own, plan_batch(rows, own)))
    # Once, where many batches have it.
    for note in dict.fromkeys(note for each in planned for note in plan_notes(*each[1:])):
        typer.echo(note, err=True)
    for each in planned:
        _print_table(*each)


def _load_tokenizer(name: str) -> Tokenize:
    """By a tokenizer of Hugging Face, without code that comes with it."""
    from transformers import AutoTokenizer

    disable_remote_code_prompt()
    fix = "Name the folder of a model, or a model of the hub"
    with as_data_error(f"--tokenizer={name}", "a tokenizer that can be read", fix):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return partial(tokenizer.encode, add_special_tokens=False)


def plan_notes(rows: Rows, job: Job, plan: BatchPlan) -> Iterator[str]:
    """What a user should know of a batch and its plan, a sentence or two each."""
    update = job.updates[ACTOR]
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
        yield f"{share}, {tokens:.1%} of the tokens, are zero-advantage rows."
    yield from plan.warnings


def _print_table(name: str, rows: Rows, job: Job, plan: BatchPlan) -> None:
    """Prints a line for each optimizer step of the actor."""
    layout, update = plan.layouts[ACTOR], job.updates[ACTOR]
    settings = ", ".join(f"{name} {getattr(job, name)}" for name in SETTINGS)
    typer.echo(f"{Path(name).name}: {plural(layout.dp_size, 'rank')}, {settings}")
    is_cut = layout.cut_by != "verl"
    steps = mini_batch_costs(layout.rows_MDK, costs_of(rows, job, update))
    table = pandas.DataFrame(steps)
    table.loc["all"] = table.sum()
    # Ranks wait for each other at each micro-batch, or once a step; so they do here if the workers
    # cut the micro-batches.
    waits = update.sync_point == "micro_batch" and is_cut
    slowest = table["micro_slowest" if waits else "mini_slowest"]
    table["imbalance"] = slowest * layout.dp_size / table["cost"]
    shown = ["real_rows", "pads", "real_tokens", "computed_tokens", "micro_batches", "imbalance"]
    if not is_cut:
        shown.remove("micro_batches")
    text = table[shown].to_string(float_format=lambda number: f"{number:.3f}".removesuffix(".000"))
    typer.echo(text)
