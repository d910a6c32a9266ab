"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from verl_padding.cli.file_rows import CountTokens
from verl_padding.cli.planned_batch import PLAN, VERL, CutLayout, PlannedBatch, draw_layouts, sharing_of
from verl_padding.cli.rows_file import read_batches
from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.plan import COST_MODELS, Job, TransformerCost
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.cost import CostModel
from verl_padding.plan.counted import counted
from verl_padding.plan.mini_batch_costs import MiniBatchCost

Compared = Mapping[str, CutLayout]

MOST_LINES = 20  # of a table: of more, only the first ones and the last are shown


def show_plan(
    path: Path, job: Job, *, tokenizer: str | None, compare: bool, as_json: bool, picture: Path | None
) -> None:
    """Plans the rows of files and prints the plans on standard output, notes on standard error.

    Args:
        job: whose actor is updated, with as many prompts as each batch has.
        tokenizer: Hugging Face name or folder, for the tokens of a rollout dump.

    Raises:
        PaddingDataError: a file or an option is refused.
        PlanError: a batch cannot be planned.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)

    def with_bar(items: Iterable[Any], what: str = "verl's packer") -> Iterable[Any]:
        return track(list(items), what, console=errors, transient=True, disable=not errors.is_terminal)

    count_tokens = None if tokenizer is None else _counter_of(tokenizer)
    batches, refused = read_batches(path, count_tokens, with_idle=job.updates[ACTOR].skips_idle)
    if picture is not None and len(batches) > 1:
        raise PaddingDataError(f"--picture {picture}: shows one batch, and {path} has more. Name one file.")
    planned = [PlannedBatch.of(batch, job) for batch in with_bar(batches, "planning")]
    # Before anything is printed: a refused command prints only its refusal.
    compared = [of_file.compared(with_bar) for of_file in planned] if compare else []
    for note, count in Counter(note for of_file in planned for note in notes_of(of_file)).items():
        errors.print(note if len(planned) == 1 else f"{note} ({count} of {len(planned)} files)", markup=False)
    left_out = [f"left out: {refusal}" for refusal in refused]
    for note in left_out:
        errors.print(note, markup=False)
    if as_json:
        shown = _as_json(path, planned, compared)
        sys.stdout.write(json.dumps(shown | ({"left_out": left_out} if left_out else {})) + "\n")
    else:
        _print_tables(path, planned, compared)
    if picture is not None:
        layouts = compared[0] if compared else {PLAN: planned[0].planned}
        drawn = [name for name in (VERL, PLAN) if name in layouts]
        draw_layouts({_heading(name, job): layouts[name] for name in drawn}, picture)
        errors.print(f"The picture is in {picture}.", markup=False)


def notes_of(planned: PlannedBatch) -> Iterator[str]:
    """What a user should know of a batch and its plan, a sentence or two each."""
    job, batch, rows = planned.job, planned.batch, planned.batch.rows
    n, dp, mini_batch = job.sessions_per_prompt, planned.update.dp_size, planned.update.prompts_per_mini_batch
    if job.sharing != "off" and rows.extends_R is None and rows.forest is None:
        yield f"--sharing {job.sharing}: nothing is shared. Give rows token_ids or extends, or take a rollout dump."
    if batch.is_dump:
        yield "The lengths are an estimate: the tokenizer's counts of the rollout dump's input and output."
    if batch.pads:
        yield f"The plan leaves out {counted(batch.pads, 'pad')} of stock verl that the rollout dump holds."
    sessions_of = Counter(prompt for prompt, _ in {*zip(rows.prompt_R, rows.session_R, strict=True)})
    if job.prompts != len(sessions_of):
        yield (
            f"--mini-batch {mini_batch}: does not divide {counted(len(sessions_of), 'prompt')} with rows. The "
            f"batch is planned as one of {counted(job.prompts, 'prompt')}, the others of which came back empty."
        )
    if n != max(sessions_of.values()):
        yield f"--n {n}: a prompt has up to {counted(max(sessions_of.values()), 'session')}."
    idle = sum(ranks < dp for ranks in planned.layout.reporting_ranks_M)
    if idle:
        steps = counted(planned.layout.n_mini_batches, "optimizer step")
        yield f"--dp {dp}: ranks have nothing but pads in {idle} of {steps}."
    if rows.idle:
        tokens = sum(rows.tokens_R[row] for row in rows.idle) / sum(rows.tokens_R)
        does = "--idle-rows skip leaves them out, which verl-padding doctor admits or refuses for a job."
        if planned.update.skips_idle:
            does = "The update leaves them out, but for one where a mini-batch has no others."
        share = f"{len(rows.idle)} of {counted(len(rows), 'row')}, {tokens:.1%} of the tokens"
        yield f"{share}, are idle: not trained, or with an advantage of exactly 0. {does}"
    elif planned.update.skips_idle:
        yield "--idle-rows skip: no row is idle, or the file has no rewards."
    yield from planned.plan.warnings
    if planned.plan.hint:
        yield planned.plan.hint


def _counter_of(tokenizer: str) -> CountTokens:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def cost_model_of(name: str) -> CostModel:
    """The cost model that an option names."""
    if name in COST_MODELS:
        return COST_MODELS[name]
    from transformers import AutoConfig

    # Not the file's own keys: it leaves out defaults of its kind of model, such as head_dim or layer_types.
    return TransformerCost.from_config(AutoConfig.from_pretrained(name).to_dict())


def _print_tables(path: Path, planned: Sequence[PlannedBatch], compared: Sequence[Compared]) -> None:
    console, job = Console(), planned[0].job
    steps = [step for of_file in planned for step in of_file.planned.steps]
    if len(planned) > 1:
        name, of = str(path), "file"
        steps_of = {Path(of_file.batch.name).name: of_file.planned.steps for of_file in planned}
    else:
        name, of = Path(planned[0].batch.name).name, "step"
        steps_of = {str(number): [step] for number, step in enumerate(steps)}
    ranks = counted(planned[0].update.dp_size, "rank")
    title = f"{name}: {ranks}, strategy {job.strategy}, packer {job.packer}, sharing {job.sharing}"
    if job.sharing != "off":
        title += f"\n{sharing_of(steps)}"
    console.print(step_table(steps_of, of=of, title=title, by_micro=job.packer == "plan"))
    console.print(f"Planning took {sum(of_file.seconds for of_file in planned):.2f} s.", highlight=False)
    if job.packer == "verl":
        console.print("Ranks are judged per optimizer step, since verl's packer cuts the micro-batches in the workers.")
    if compared:
        totals = {_heading(name, job): figures for name, figures in _totals(planned, compared).items()}
        console.print(comparison_table(totals, title=f"{counted(len(planned), 'batch')}, stock verl and the plan"))


def _totals(planned: Sequence[PlannedBatch], compared: Sequence[Compared]) -> dict[str, dict[str, float]]:
    row_cost = sum(int(of_file.planned.costs.cost_R.sum()) for of_file in planned)
    steps_of = {name: [step for layouts in compared for step in layouts[name].steps] for name in compared[0]}
    return {name: totals_of(steps, row_cost) for name, steps in steps_of.items()}


def _heading(name: str, job: Job) -> str:
    with_sharing = "plan with trees" if job.sharing == "trees" else "plan with sharing"
    return with_sharing if name == PLAN and job.sharing != "off" else name.replace("_", " ")


def _as_json(path: Path, planned: Sequence[PlannedBatch], compared: Sequence[Compared]) -> dict[str, Any]:
    batches = []
    for number, of_file in enumerate(planned):
        layout = layout_as_json(of_file.layout, of_file.plan.figures[ACTOR], of_file.batch.lines_R)
        layout["figures"]["plan_seconds"] = of_file.seconds
        entry = {"file": of_file.batch.name, **layout, "notes": list(notes_of(of_file))}
        if compared:
            entry["comparison"] = _totals([of_file], [compared[number]])
        batches.append(entry)
    settings = {name: getattr(planned[0].job, name) for name in ("strategy", "packer", "sharing")}
    if not path.is_dir() and len(batches) == 1:
        return settings | batches[0]
    return settings | {"batches": batches} | ({"comparison": _totals(planned, compared)} if compared else {})


def totals_of(steps: Sequence[MiniBatchCost], row_cost: int) -> dict[str, float]:
    """A layout of one batch or several in numbers, which docs/rows_file.md explains.

    "Perfect" is the time of ranks that never wait and compute each real row, at ``row_cost`` for all, and no pad.
    """
    mean = sum(step.cost for step in steps) / steps[0].ranks
    perfect = row_cost / steps[0].ranks
    mini, micro = sum(step.mini_slowest for step in steps), sum(step.micro_slowest for step in steps)
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
        table.add_column(name, justify="right", overflow="fold")
    for figure in next(iter(totals.values())):
        numbers = [of_layout[figure] for of_layout in totals.values()]
        cells = [f"{number:,}" if isinstance(number, int) else f"{number:.3f}" for number in numbers]
        table.add_row(figure.replace("_", " "), *cells)
    return table


def step_table(steps_of: Mapping[str, Sequence[MiniBatchCost]], *, of: str, title: str, by_micro: bool) -> Table:
    """A line for the steps of each name, the middle ones folded if there are many, and a line for all steps.

    Args:
        of: what a name is: a ``step``, or a ``file`` with some steps.
        by_micro: ranks wait for each other at each micro-batch; False if the workers cut them, then once per step.
    """
    every = [step for steps in steps_of.values() for step in steps]
    is_shown = {
        "steps": of == "file",
        "computed\ntokens": any(step.computed_tokens < step.real_tokens for step in every),
        "micro-\nbatches": by_micro,
    }
    columns = [column for column in _cells(every, by_micro) if is_shown.get(column, True)]
    lines = dict(steps_of)
    if len(lines) > MOST_LINES:
        *first, last = lines
        hidden = first[MOST_LINES - 2 :]
        folded = {f"{len(hidden)} more": [step for name in hidden for step in steps_of[name]]}
        lines = {name: steps_of[name] for name in first[: MOST_LINES - 2]} | folded | {last: steps_of[last]}
    table = Table(title=escape(title), title_justify="left", show_footer=True)
    table.add_column(of, footer="all", justify="right", no_wrap=True)
    for column in columns:
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=_cells(every, by_micro)[column], justify="right", no_wrap=True)
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
        "slowest /\nmean rank": f"{slowest * steps[0].ranks / sum(step.cost for step in steps):.3f}",
        "over lower\nbound": f"{slowest / max(bound, 1):.3f}",
    }
