"""The batch of a file, planned; other layouts of the same rows to compare the plan with; and a picture of layouts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import numpy as np

from verl_padding.cli.rows_file import RowsFile
from verl_padding.job.calls import ACTOR
from verl_padding.plan import BatchPlan, Job, PlanError, Sharing, Update, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.counted import counted
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import (
    MiniBatchCost,
    RowsMDK,
    micro_batch_loads,
    micro_batches_of,
    mini_batch_costs,
)
from verl_padding.plan.planner import costs_of
from verl_padding.runs import charts
from verl_padding.stock.padding import VERL_PAD_TOKENS, Track, pack_as_verl, verl_layout

VERL, PLAN = "verl", "plan"  # layouts that are compared
LESS_SHARED: dict[Sharing, dict[Sharing, str]] = {
    "off": {},
    "chains": {"off": "plan_without_sharing"},
    "trees": {"off": "plan_without_sharing", "chains": "plan_with_chains"},
}  # and those that share less than what was asked for
MOST_STEPS, MOST_RANKS, MOST_BARS = 6, 64, 128  # in a picture: with many ranks, fewer steps, to fit a screen or two


@dataclass(frozen=True, kw_only=True)
class CutLayout:
    """A layout of a batch, cut into micro-batches, and the costs of its rows and pads."""

    rows_MDK: RowsMDK
    costs: CallCosts
    is_cut: bool = True  # False if the workers cut the micro-batches: each cell is one here

    @cached_property
    def steps(self) -> list[MiniBatchCost]:
        return mini_batch_costs(self.rows_MDK, self.costs, with_micro_bounds=self.is_cut)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The batch of a file, and its plan."""

    batch: RowsFile
    job: Job
    plan: BatchPlan
    seconds: float  # of planning

    @classmethod
    def of(cls, batch: RowsFile, job: Job) -> Self:
        """Plans a batch, as of a job whose data loader gives its number of prompts, rounded up to whole mini-batches.

        Raises:
            PlanError: it cannot be planned.
        """
        started = time.perf_counter()
        mini_batches = math.ceil(len(set(batch.rows.prompt_R)) / job.updates[ACTOR].prompts_per_mini_batch)
        job = replace(job, prompts=mini_batches * job.updates[ACTOR].prompts_per_mini_batch)
        try:
            plan = plan_batch(batch.rows, job)
        except PlanError as refusal:
            raise PlanError(f"{batch.name}: {refusal}") from refusal
        return cls(batch=batch, job=job, plan=plan, seconds=time.perf_counter() - started)

    @property
    def update(self) -> Update:
        return self.job.updates[ACTOR]

    @property
    def layout(self) -> Layout:
        return self.plan.layouts[ACTOR]

    @cached_property
    def planned(self) -> CutLayout:
        costs = costs_of(self.batch.rows, self.job, self.update)
        is_cut = self.layout.micro_batch_rows is not None
        return CutLayout(rows_MDK=micro_batches_of(self.layout), costs=costs, is_cut=is_cut)

    def compared(self, track: Track) -> dict[str, CutLayout]:
        """Stock verl's layout and the plan's, both cut into micro-batches; verl's packer is slow.

        Args:
            track: wraps the numbers of the optimizer steps, for a progress bar.

        Raises:
            PaddingDataError: stock verl would stop at this batch.
        """
        rows, costs, budget = self.batch.rows, self.planned.costs, self.update.token_budget
        assert budget is not None, "an option without a default"
        mini_batch_rows = self.update.prompts_per_mini_batch * self.job.sessions_per_prompt
        shape = {"dp_size": self.update.dp_size, "mini_batch_rows": mini_batch_rows, "token_budget": budget}
        stock_MDK = verl_layout(rows.tokens_R, **shape, track=track)
        unshared = replace(costs, forest=None)
        layouts = {VERL: CutLayout(rows_MDK=stock_MDK, costs=replace(unshared, pad_tokens=VERL_PAD_TOKENS))}
        jobs = {name: replace(self.job, sharing=sharing) for sharing, name in LESS_SHARED[self.job.sharing].items()}
        if self.update.skips_idle:
            jobs["plan_computing_idle_rows"] = replace(
                self.job, updates={ACTOR: replace(self.update, skips_idle=False)}
            )
        for name, job in jobs.items():
            layouts[name] = self._cut(plan_batch(rows, job).layouts[ACTOR], costs_of(rows, job, self.update), track)
        return layouts | {PLAN: self._cut(self.layout, costs, track)}

    def _cut(self, layout: Layout, costs: CallCosts, track: Track) -> CutLayout:
        """A layout with its micro-batches, which verl's packer cuts where the plan has not."""
        if layout.micro_batch_rows is not None:
            return CutLayout(rows_MDK=micro_batches_of(layout), costs=costs)
        assert self.update.token_budget is not None, "an option without a default"
        tokens_R = [*self.batch.rows.tokens_R, *[self.job.pad_tokens] * layout.n_pads]
        cells_M = [layout.cells[step] for step in track(range(layout.n_mini_batches))]
        packed_MDK = [pack_as_verl(cells, tokens_R, self.update.token_budget) for cells in cells_M]
        return CutLayout(rows_MDK=packed_MDK, costs=costs)


def sharing_of(steps: Sequence[MiniBatchCost]) -> str:
    """How many tokens are computed where rows share prefixes."""
    tokens, computed = sum(step.real_tokens for step in steps), sum(step.computed_tokens for step in steps)
    return f"{computed:,} of {tokens:,} tokens computed: sharing factor {tokens / computed:.2f}"


def draw_layouts(layouts: Mapping[str, CutLayout], path: Path) -> None:
    """Draws the first steps of layouts of one batch, by their names, side by side, micro-batch after micro-batch.

    A micro-batch begins when all ranks are ready. All steps have one scale, so that they can be compared.
    """
    all_ranks = len(next(iter(layouts.values())).rows_MDK[0])
    ranks = min(all_ranks, MOST_RANKS)
    steps = min(max(len(layout.steps) for layout in layouts.values()), MOST_STEPS, MOST_BARS // ranks)
    size = (10 * len(layouts), 1 + steps * (0.8 + 0.16 * ranks))
    figure, axes_MC = charts.new_figure(nrows=steps, ncols=len(layouts), sharex=True, squeeze=False, figsize=size)
    looks: dict[str, dict[str, Any]] = {}
    for column, (name, layout) in enumerate(layouts.items()):
        colours = (charts.STOCK, charts.STOCK_LIGHT) if name == VERL else (charts.OURS, charts.OURS_LIGHT)
        its_steps = min(steps, len(layout.steps))
        title = f"{name}, {its_steps} of {counted(len(layout.steps), 'step')}"
        axes_MC[0, column].set_title(title if layout.costs.forest is None else f"{title}\n{sharing_of(layout.steps)}")
        for step, axes in enumerate(axes_MC[:its_steps, column]):
            _draw_step(axes, layout, step, ranks, colours)
            axes.set_ylabel(f"step {step}\nrank")
        for axes in axes_MC[its_steps:, column]:
            axes.set_axis_off()
        lowest = axes_MC[its_steps - 1, column]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("cost, in rows of 1000 tokens")
        looks[f"rows ({name})"] = {"facecolor": colours[0]}
    left_out = "" if ranks == all_ranks else f" ({ranks} of {all_ranks} ranks)"
    figure.suptitle(f"micro-batches of each rank{left_out}")
    charts.add_legend(figure, {**looks, "pads": {"facecolor": charts.PADS}, "waiting": charts.WAITING})
    charts.save_chart(figure, path)


def _draw_step(axes: Any, layout: CutLayout, step: int, ranks: int, colours: tuple[str, str]) -> None:
    costs, unit = layout.costs, layout.costs.row_cost(1000)
    real_DK, pads_DK = _loads(layout.rows_MDK[step], costs)
    heights_K = (real_DK + pads_DK).max(axis=0)
    starts_K = np.cumsum(heights_K) - heights_K
    assert costs.call.padded_to == "row", "a row is as wide as what it costs"
    for rank in range(ranks):
        for micro, (start, colour) in enumerate(zip(starts_K, cycle(colours), strict=False)):
            real, pads = real_DK[rank, micro], pads_DK[rank, micro]
            parts = (real / unit, pads / unit, (heights_K[micro] - real - pads) / unit)
            charts.draw_bar(axes, rank, start / unit, *parts, colour=colour)
    axes.set_ylim(ranks - 0.4, -0.6)


def _loads(rows_DK: Sequence[Sequence[Sequence[int]]], costs: CallCosts) -> tuple[Any, Any]:
    """Cost of each micro-batch of each rank without its pads, and that of its pads."""
    load_DK = np.array([micro_batch_loads(rows_K, costs) for rows_K in rows_DK], dtype=np.int64)
    n_pads_DK = [[sum(row >= costs.n_rows for row in rows) for rows in rows_K] for rows_K in rows_DK]
    pads_DK = costs.pad * np.array(n_pads_DK, dtype=np.int64)
    return load_DK - pads_DK, pads_DK
