"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from verl_padding.cli.batch_reader import Tokenize, read_batches
from verl_padding.cli.doctor import as_a_job_would_start
from verl_padding.cli.page import write_page
from verl_padding.cli.planned_batch import CutLayout, PlannedBatch, plan_file_batch
from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.doctor.installation import choose_platform
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.plan import Job, Packer, Sharing, Update
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.mini_batch_costs import MiniBatchCost
from verl_padding.plan.plural import plural

Compared = Mapping[str, CutLayout]

MAX_LINES = 20
"""Of a table: of more, only the first ones and the last are shown."""


@dataclass(frozen=True, kw_only=True)
class QuickLook:
    """The options that take a job's place; None for those that are not given."""

    dp: int | None
    mini_batch: int | None
    n: int | None
    budget: int | None
    strategy: str | None
    packer: Packer | None
    sharing: Sharing | None


def job_to_plan(arguments: JobArguments, quick: QuickLook) -> Job:
    """The planner's job of a verl config, or else of the options; a PaddingConfigError if it is
    neither, or both."""
    sizes = {
        "--dp": quick.dp,
        "--mini-batch": quick.mini_batch,
        "--n": quick.n,
        "--budget": quick.budget,
    }
    if arguments == JobArguments():
        if missing := [name for name, value in sizes.items() if value is None]:
            fix = "Give a job's overrides behind --, or all four sizes"
            raise PaddingConfigError(f"{', '.join(missing)}: missing. {fix}.")
        return _quick_job(quick)
    others = {"--strategy": quick.strategy, "--packer": quick.packer, "--sharing": quick.sharing}
    for name, value in (sizes | others).items():
        if value is not None:
            raise PaddingConfigError(
                f"{name}={value}: the job's overrides say it. Leave the option out."
            )
    return _composed_job(arguments)


def _composed_job(arguments: JobArguments) -> Job:
    with as_a_job_would_start():
        choose_platform()
        try:
            config = compose_job(arguments)
        except (Exception, SystemExit) as error:  # a broken plug-in ends a process that asks for it
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise PaddingConfigError(
                f"overrides: {why}. Run verl-padding doctor with the same."
            ) from error
        from verl_padding.driver.job_check import check_job
        from verl_padding.driver.trainers import asks_for_padding

        if not asks_for_padding(config):
            raise PaddingConfigError("padding: the job does not ask for it. Add +padding=prompt.")
        return check_job(config).step_job()


def _quick_job(quick: QuickLook) -> Job:
    assert quick.dp is not None
    assert quick.mini_batch is not None
    assert quick.n is not None
    update = Update(
        dp_size=quick.dp,
        token_budget=quick.budget,
        prompts_per_mini_batch=quick.mini_batch,
        mini_batch_setting="--mini-batch",
        budget_setting="--budget",
    )
    return Job(
        strategy=quick.strategy or PaddingConfig.strategy,
        prompts=quick.mini_batch,
        sessions_per_prompt=quick.n,
        sessions_setting="--n",
        updates={ACTOR: update},
        inference={},
        packer=quick.packer or PaddingConfig.packer,
        sharing=quick.sharing or PaddingConfig.sharing,
        pad_tokens=MIN_PAD_LENGTH,
    )


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

    def with_bar(items: Iterable[Any], what: str = "verl's packer") -> Iterable[Any]:
        return track(
            list(items), what, console=errors, transient=True, disable=not errors.is_terminal
        )

    tokenize = None if tokenizer is None else _load_tokenizer(tokenizer)
    batches, refused = read_batches(
        path, tokenize, find_shared=job.sharing != "off" or page is not None
    )
    planned = [plan_file_batch(batch, job) for batch in with_bar(batches, "planning")]
    # Before anything is printed: a refused command prints only its refusal.
    compared = [each.compared(with_bar) for each in planned] if compare else []
    for note, count in Counter(note for batch in planned for note in plan_notes(batch)).items():
        errors.print(
            note if len(planned) == 1 else f"{note} ({count} of {len(planned)} files)", markup=False
        )
    left_out = [f"left out: {refusal}" for refusal in refused]
    for note in left_out:
        errors.print(note, markup=False)
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
        notes = [*(note for batch in planned for note in plan_notes(batch)), *left_out]
        write_page(page, title=path.name, curves={}, steps=steps, notes=list(dict.fromkeys(notes)))
        errors.print(f"The page is in {page}.", markup=False)


def plan_notes(planned: PlannedBatch) -> Iterator[str]:
    """What a user should know of a batch and its plan, a sentence or two each."""
    job, batch, update, rows = planned.job, planned.batch, planned.update, planned.batch.rows
    if job.sharing != "off" and rows.forest is None:
        yield (
            f"sharing={job.sharing}: nothing is shared. Give rows token_ids or shares, or take a"
            " rollout dump."
        )
    if batch.is_dump:
        yield (
            "The lengths are an estimate: the tokenizer's counts of the rollout dump's input and"
            " output."
        )
    if batch.pads:
        yield (
            f"The plan leaves out {plural(batch.pads, 'pad')} of stock verl that the rollout dump"
            " holds."
        )
    sessions_of = Counter(
        prompt for prompt, _ in {*zip(rows.prompt_R, rows.session_R, strict=True)}
    )
    if job.prompts != len(sessions_of):
        yield (
            f"{update.mini_batch_setting}={update.prompts_per_mini_batch}: does not divide "
            f"{plural(len(sessions_of), 'prompt')} with rows. The batch is planned as one of "
            f"{plural(job.prompts, 'prompt')}, the others of which came back empty."
        )
    if job.sessions_per_prompt != max(sessions_of.values()):
        most = plural(max(sessions_of.values()), "session")
        yield f"{job.sessions_setting}={job.sessions_per_prompt}: a prompt has up to {most}."
    idle = sum(ranks < update.dp_size for ranks in planned.layout.reporting_ranks_M)
    if idle:
        steps = plural(planned.layout.n_mini_batches, "optimizer step")
        yield f"{plural(update.dp_size, 'rank')}: some have nothing but pads in {idle} of {steps}."
    if rows.idle:
        tokens = sum(rows.tokens_R[row] for row in rows.idle) / sum(rows.tokens_R)
        share = f"{len(rows.idle)} of {plural(len(rows), 'row')}, {tokens:.1%} of the tokens"
        yield (
            f"{share}, add nothing to the gradient: not trained, or with an advantage of exactly 0."
        )
    yield from planned.plan.warnings
    if planned.plan.hint:
        yield planned.plan.hint


def _load_tokenizer(name: str) -> Tokenize:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(name)
    return lambda text: loaded.encode(text, add_special_tokens=False)


def _print_tables(
    path: Path, planned: Sequence[PlannedBatch], compared: Sequence[Compared]
) -> None:
    console, job = Console(), planned[0].job
    steps = [step for batch in planned for step in batch.planned.steps]
    if len(planned) > 1:
        name, of = str(path), "file"
        steps_by_name = {Path(batch.batch.name).name: batch.planned.steps for batch in planned}
    else:
        name, of = Path(planned[0].batch.name).name, "step"
        steps_by_name = {str(number): [step] for number, step in enumerate(steps)}
    ranks = plural(planned[0].update.dp_size, "rank")
    title = f"{name}: {ranks}, strategy {job.strategy}, packer {job.packer}, sharing {job.sharing}"
    if job.sharing != "off":
        tokens, computed = (
            sum(step.real_tokens for step in steps),
            sum(step.computed_tokens for step in steps),
        )
        title += (
            f"\n{computed:,} of {tokens:,} tokens computed: sharing factor {tokens / computed:.2f}"
        )
    by_micro = planned[0].planned.is_cut
    console.print(step_table(steps_by_name, of=of, title=title, by_micro=by_micro))
    console.print(
        f"Planning took {sum(batch.seconds for batch in planned):.2f} s.", highlight=False
    )
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
    return (
        settings
        | {"batches": batches}
        | ({"comparison": _totals(planned, compared)} if compared else {})
    )


def layout_totals(steps: Sequence[MiniBatchCost], row_cost: int) -> dict[str, float]:
    """A layout of one batch or several in numbers, which docs/reference.md explains.

    "Perfect" is the time of ranks that never wait and compute each real row, at ``row_cost`` for
    all, and no pad.
    """
    mean = sum(step.cost for step in steps) / steps[0].ranks
    perfect = row_cost / steps[0].ranks
    mini, micro = (
        sum(step.mini_slowest for step in steps),
        sum(step.micro_slowest for step in steps),
    )
    return {
        "optimizer_steps": len(steps),
        "real_rows_min": min(step.real_rows for step in steps),
        "real_rows_max": max(step.real_rows for step in steps),
        "rows": sum(step.real_rows for step in steps),
        "pads": sum(step.pads for step in steps),
        "tokens": sum(step.real_tokens for step in steps),
        "pad_tokens": sum(step.tokens - step.real_tokens for step in steps),
        "computed_tokens": sum(step.computed_tokens for step in steps),
        "micro_batches": sum(step.micro_batches for step in steps),
        "imbalance": mini / mean,
        "micro_imbalance": micro / mean,
        "over_perfect": mini / perfect,
        "micro_over_perfect": micro / perfect,
    }


def comparison_table(totals: Mapping[str, Mapping[str, float]], *, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in totals:
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for figure in next(iter(totals.values())):
        numbers = [column[figure] for column in totals.values()]
        cells = [
            f"{number:,}" if isinstance(number, int) else f"{number:.3f}" for number in numbers
        ]
        table.add_row(figure.replace("_", " "), *cells)
    return table


def step_table(
    steps_by_name: Mapping[str, Sequence[MiniBatchCost]], *, of: str, title: str, by_micro: bool
) -> Table:
    """A line for the steps of each name, the middle ones folded if there are many, and a line for
    all steps.

    Args:
        of: what a name is: a ``step``, or a ``file`` with some steps.
        by_micro: ranks wait for each other at each micro-batch; False if the workers cut them, then
            once per step.
    """
    every = [step for steps in steps_by_name.values() for step in steps]
    is_shown = {
        "steps": of == "file",
        "computed\ntokens": any(step.computed_tokens < step.real_tokens for step in every),
        "micro-\nbatches": by_micro,
    }
    footer = _cells(every, by_micro)
    columns = [column for column in footer if is_shown.get(column, True)]
    lines = dict(steps_by_name)
    if len(lines) > MAX_LINES:
        *first, last = lines
        hidden = first[MAX_LINES - 2 :]
        folded = {f"{len(hidden)} more": [step for name in hidden for step in steps_by_name[name]]}
        lines = (
            {name: steps_by_name[name] for name in first[: MAX_LINES - 2]}
            | folded
            | {last: steps_by_name[last]}
        )
    table = Table(title=escape(title), title_justify="left", show_footer=True)
    table.add_column(of, footer="all", justify="right", no_wrap=True)
    for column in columns:
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=footer[column], justify="right", no_wrap=True)
    for name, steps in lines.items():
        cells = _cells(steps, by_micro)
        table.add_row(name, *[cells[column] for column in columns])
    return table


def _cells(steps: Sequence[MiniBatchCost], by_micro: bool) -> dict[str, str]:
    slowest = sum(step.micro_slowest if by_micro else step.mini_slowest for step in steps)
    bound = sum(step.micro_bound if by_micro else step.mini_bound for step in steps)
    return {
        "steps": f"{len(steps):,}",
        "rows": f"{sum(step.real_rows for step in steps):,}",
        "pads": f"{sum(step.pads for step in steps):,}",
        "tokens\nof rows": f"{sum(step.real_tokens for step in steps):,}",
        "computed\ntokens": f"{sum(step.computed_tokens for step in steps):,}",
        "micro-\nbatches": f"{sum(step.micro_batches for step in steps):,}",
        "slowest /\nmean rank": (
            f"{slowest * steps[0].ranks / sum(step.cost for step in steps):.3f}"
        ),
        "over lower\nbound": f"{slowest / max(bound, 1):.3f}",
    }
