"""The command ``verl-padding plan``: shows the plan of batches without training on them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from verl_padding.cli.comparison import LayoutTotals, comparison_table
from verl_padding.cli.plan_notes import all_notes, notes_of
from verl_padding.cli.plan_table import step_table
from verl_padding.cli.planned_file import PLAN, UNSHARED, VERL, LaidOut, PlannedFile, PlanRequest
from verl_padding.cli.row_lines import place
from verl_padding.cli.rows_file import NoRowError, files_of, read_rows_file
from verl_padding.cli.token_counter import first_line, token_counter
from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.plan import COST_MODELS, PlanError, TransformerCost
from verl_padding.plan.batch_plan import layout_as_json
from verl_padding.plan.cost import CostModel
from verl_padding.plan.counted import counted
from verl_padding.runs.charts import OURS, OURS_LIGHT, STOCK, STOCK_LIGHT
from verl_padding.stock.layout import Track
from verl_padding.timing.learned_costs import LearnedCosts

COLOURS = {VERL: (STOCK, STOCK_LIGHT), PLAN: (OURS, OURS_LIGHT)}

Compared = Mapping[str, LaidOut]
"""Layouts of one batch, by their names, in the order in which they are shown."""


def show_plan(request: PlanRequest, *, compare: bool, as_json: bool, picture: Path | None) -> int:
    """Plans the rows of files and prints the plans on standard output; returns the exit code, 2 for a refusal."""
    notes = Console(stderr=True)
    try:
        # Before anything is printed: a refused command prints only its refusal.
        files, told = _planned_files(request, notes, compare=compare, picture=picture)
        for note in [*told, *all_notes(files)]:
            notes.print(note, markup=False, highlight=False, soft_wrap=True)
        if not as_json:
            _print_tables(request, files)
        compared = _compared(files, notes) if compare else []
        if as_json:
            sys.stdout.write(json.dumps(_as_json(request, files, compared)) + "\n")
        elif compared:
            whole = counted(len(files), "batch") if request.is_folder else "the whole batch"
            totals = {_heading(name, request): total for name, total in _totals(files, compared).items()}
            Console().print(comparison_table(totals, title=f"{whole}, stock verl and the plan"))
        if picture is not None:
            _draw(files[0], compared, picture, notes)
    except (PaddingDataError, PlanError) as refusal:
        notes.print(str(refusal), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def _planned_files(
    request: PlanRequest, notes: Console, *, compare: bool, picture: Path | None
) -> tuple[list[PlannedFile], list[str]]:
    """Reads and plans all files, and refuses what would be refused later.

    Returns: the files, and notes on costs, and on what a job that was killed has left and no plan holds.

    Raises:
        PaddingDataError: a file, an option or the picture is refused.
        PlanError: a batch cannot be planned.
    """
    cost_model, told = _cost_model(request.cost_model)
    count_tokens, files = token_counter(request.tokenizer), files_of(request.path)
    if picture is not None and request.is_folder:
        raise PaddingDataError(
            f"--picture {picture}: shows one batch, and {request.path} is a folder of them. Name one of its files, "
            "or leave --picture out."
        )
    planned: list[PlannedFile] = []
    for number in _bar("planning", notes)(range(len(files))):
        try:
            batch = read_rows_file(files[number], count_tokens)
        except NoRowError:
            if not request.is_folder:
                raise
            told.append(f"{files[number]}: holds no row, and is left out.")
            continue
        if batch.half_written is not None:
            told.append(f"{place(batch.name, batch.half_written)}: half written, and left out.")
        planned.append(PlannedFile.of(request, batch, cost_model))
    if not planned:
        raise PaddingDataError(
            f"{request.path}: holds no row in {counted(len(files), 'rollout dump')}. Name the folder of a job that has "
            "ended a step."
        )
    if compare:
        for file in planned:
            file.refuse_comparison()
    return planned, told


def _cost_model(name: str) -> tuple[CostModel, list[str]]:
    """The cost model that an option names, and notes on it."""
    if name in COST_MODELS:
        return COST_MODELS[name], []
    if os.path.isfile(name):
        learned = LearnedCosts.read(Path(name))
        measured = learned.fitted().get(ACTOR)
        if measured is None:
            raise PaddingDataError(
                f"--cost-model {name}: has no costs of the actor's update. Name one of a later step."
            )
        if ACTOR in learned.used():
            return measured, []
        by_formula = "its job still planned by the formula, since these costs had not foretold its seconds better."
        return measured, [f"--cost-model {name}: {by_formula}"]
    if not os.path.isfile(Path(name) / "config.json"):
        raise PaddingDataError(
            f"--cost-model {name}: not {' or '.join(COST_MODELS)}, nor a folder with a config.json, nor a file of "
            "measured costs. Name one of them."
        )
    from transformers import AutoConfig

    # Not the file's own keys: it leaves out defaults of its kind of model, such as head_dim or layer_types.
    try:
        config = AutoConfig.from_pretrained(name).to_dict()
    except Exception as error:  # whatever transformers makes of a file that is no config
        raise PaddingDataError(
            f"--cost-model {name}: config.json cannot be read ({first_line(error)}). Choose --cost-model attention."
        ) from error
    return TransformerCost.from_config(config), []


def _print_tables(request: PlanRequest, files: Sequence[PlannedFile]) -> None:
    if request.is_folder:
        of, steps_of, name = "file", {Path(file.batch.name).name: file.steps for file in files}, str(request.path)
    else:
        of, steps_of = "step", {str(number): [step] for number, step in enumerate(files[0].steps)}
        name = Path(files[0].batch.name).name
    sharing = "" if request.sharing == "off" else f", sharing {request.sharing}"
    title = f"{name}: {counted(request.dp_size, 'rank')}, strategy {request.strategy}, packer {request.packer}{sharing}"
    if request.sharing != "off":
        steps = [step for file in files for step in file.steps]
        tokens, computed = sum(step.real_tokens for step in steps), sum(step.computed_tokens for step in steps)
        title += f"\n{computed:,} of {tokens:,} tokens computed: sharing factor {tokens / computed:.2f}"
    Console().print(step_table(steps_of, of=of, title=title, packer=request.packer))
    seconds = sum(file.seconds for file in files)
    told = [f"Planning took {seconds:.2f} s. The cost model is {request.cost_model}."]
    if request.packer == "verl":
        told.append(
            "Ranks are judged per optimizer step: verl's packer cuts the micro-batches in the workers. --compare "
            "asks it too (slow); --packer plan leaves them to the plan."
        )
    for line in told:
        Console().print(line, markup=False, highlight=False)


def _compared(files: Sequence[PlannedFile], notes: Console) -> list[Compared]:
    """The layouts of each batch that are compared."""
    compared: list[Compared] = []
    for file in files:
        bar = _bar(f"verl's packer, {Path(file.batch.name).name}", notes)
        layouts = {VERL: file.stock(bar)}
        if file.request.sharing == "chains":
            layouts[UNSHARED] = file.unshared()
        compared.append({**layouts, PLAN: file.laid_out(bar)})
    return compared


def _bar(told: str, notes: Console) -> Track:
    return lambda numbers: track(list(numbers), told, console=notes, transient=True, disable=not notes.is_terminal)


def _totals(files: Sequence[PlannedFile], compared: Sequence[Compared]) -> dict[str, LayoutTotals]:
    """Each layout in numbers, over all files."""
    row_cost = sum(int(file.costs.cost_R.sum()) for file in files)
    return {
        name: LayoutTotals.of([step for layouts in compared for step in layouts[name].steps], row_cost)
        for name in compared[0]
    }


def _heading(name: str, request: PlanRequest) -> str:
    return "plan with sharing" if name == PLAN and request.sharing == "chains" else name.replace("_", " ")


def _as_json(request: PlanRequest, files: Sequence[PlannedFile], compared: Sequence[Compared]) -> dict[str, Any]:
    """The form is in docs/rows_file.md."""
    told = []
    for number, file in enumerate(files):
        layout, figures = file.layout, file.plan.figures[ACTOR]
        of_file = {"file": file.batch.name, **layout_as_json(layout, figures, file.batch.lines_R)}
        of_file["figures"]["plan_seconds"] = file.seconds
        of_file["notes"] = notes_of(file)
        if compared:
            of_file["comparison"] = _totals_as_json(_totals([file], [compared[number]]))
        told.append(of_file)
    settings = {"strategy": request.strategy, "packer": request.packer, "sharing": request.sharing}
    if not request.is_folder:
        return settings | told[0]
    whole = {"comparison": _totals_as_json(_totals(files, compared))} if compared else {}
    return {**settings, "batches": told, **whole}


def _totals_as_json(totals: Mapping[str, LayoutTotals]) -> dict[str, Any]:
    return {name: asdict(total) for name, total in totals.items()}


def _draw(file: PlannedFile, compared: Sequence[Compared], picture: Path, notes: Console) -> None:
    from verl_padding.cli.plan_picture import MOST_STEPS, draw_layouts

    layouts = compared[0] if compared else {PLAN: file.laid_out(_bar("verl's packer", notes), most_steps=MOST_STEPS)}
    drawn = [name for name in COLOURS if name in layouts]
    draw_layouts({_heading(name, file.request): (layouts[name], COLOURS[name]) for name in drawn}, picture)
    notes.print(f"The picture is in {picture}.", markup=False, highlight=False, soft_wrap=True)
