"""The batch of a file, planned, and other layouts of the same rows to compare the plan with."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from verl_padding.cli.batch_reader import FileBatch
from verl_padding.cli.charts import Chart, planned_chart
from verl_padding.cli.page import ShownStep, recorded_step
from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.plan import BatchPlan, Job, PlanError, Update, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import (
    MiniBatchCost,
    RowsMDK,
    micro_batches_of,
    mini_batch_costs,
)
from verl_padding.plan.planner import costs_of
from verl_padding.stock.padding import VERL_PAD_TOKENS, pack_as_verl, verl_layout

VERL, PLAN = "verl", "plan"
"""Layouts that are compared."""


@dataclass(frozen=True, kw_only=True)
class CutLayout:
    """A layout of a batch, cut into micro-batches, and the costs of its rows and pads."""

    rows_MDK: RowsMDK
    costs: CallCosts
    is_cut: bool = True
    """False if the workers cut the micro-batches: each cell is one here."""

    @cached_property
    def steps(self) -> list[MiniBatchCost]:
        return mini_batch_costs(self.rows_MDK, self.costs)

    def chart(self) -> Chart:
        return planned_chart(self.rows_MDK, self.costs, is_cut=self.is_cut)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The batch of a file, and its plan."""

    batch: FileBatch
    job: Job
    plan: BatchPlan
    seconds: float
    """Of planning."""
    compared: Mapping[str, CutLayout] = field(default_factory=dict)
    """Stock verl's layout of the actor's update, and the plan's; none where nobody asked."""

    @property
    def update(self) -> Update:
        return self.job.updates[ACTOR]

    @property
    def layout(self) -> Layout:
        return self.plan.layouts[ACTOR]

    @cached_property
    def calls(self) -> dict[str, CutLayout]:
        """The layout of each worker call."""
        found = {}
        for name, call in self.job.calls():
            layout, costs = self.plan.layouts[name], costs_of(self.batch.rows, self.job, call)
            is_cut = layout.micro_batch_rows is not None
            found[name] = CutLayout(rows_MDK=micro_batches_of(layout), costs=costs, is_cut=is_cut)
        return found

    @property
    def planned(self) -> CutLayout:
        """That of the actor's update."""
        return self.calls[ACTOR]

    def beside_stock(self) -> Self:
        """With the layouts to compare, cut into micro-batches.

        Raises:
            PaddingDataError: stock verl would stop at this batch, or micro-batches are not cut by
                their tokens.
        """
        rows, costs, budget = self.batch.rows, self.planned.costs, self.update.token_budget
        if budget is None or costs.call.padded_to != "row":
            why = "stock verl's layout is known for packed rows with a token budget"
            raise PaddingDataError(f"--compare: {why}. Leave --compare out.")
        stock_MDK = verl_layout(
            rows.tokens_R,
            dp_size=self.update.dp_size,
            mini_batch_rows=self.update.prompts_per_mini_batch * self.job.sessions_per_prompt,
            token_budget=budget,
        )
        stock_costs = replace(costs, forest=None, pad_tokens=VERL_PAD_TOKENS)
        plan_MDK = micro_batches_of(self.layout)
        if self.layout.micro_batch_rows is None:  # verl's packer cuts them, in the workers
            tokens_R = [*rows.tokens_R, *[self.job.pad_tokens] * self.layout.n_pads]
            plan_MDK = [pack_as_verl(cells_D, tokens_R, budget) for cells_D in self.layout.cells]
        stock = CutLayout(rows_MDK=stock_MDK, costs=stock_costs)
        return replace(
            self, compared={VERL: stock, PLAN: CutLayout(rows_MDK=plan_MDK, costs=costs)}
        )

    def shown_step(self) -> ShownStep:
        """What a page shows of it."""
        layouts = {**self.calls, **self.compared}
        charts = {name: layout.chart() for name, layout in layouts.items()}
        rows, name = self.batch.rows, self.batch.name
        if self.batch.recorded is not None:
            step = recorded_step(self.batch.recorded, run="", texts={})
            return replace(step, name=name, charts=charts)
        columns = {"tokens": rows.tokens_R}
        if rows.forest is not None:
            columns["shared_tokens"] = tuple(rows.forest.shared_R.tolist())
        return ShownStep(
            name=name, run="", keys=rows.key_R, columns=columns, charts=charts, forest=rows.forest
        )


def plan_file_batch(batch: FileBatch, job: Job) -> PlannedBatch:
    """Plans a batch, as of a job whose data loader gives its number of prompts, rounded up to whole
    mini-batches.

    Raises:
        PlanError: it cannot be planned.
    """
    # 15 prompts with mini-batches of 4 are planned as 16, one of which has no rows.
    started = time.perf_counter()
    multiple = math.lcm(*(update.prompts_per_mini_batch for update in job.updates.values()))
    job = replace(job, prompts=-(-len(set(batch.rows.prompt_R)) // multiple) * multiple)
    try:
        plan = plan_batch(batch.rows, job)
    except PlanError as refusal:
        raise PlanError(f"{batch.name}: {refusal}") from refusal
    return PlannedBatch(batch=batch, job=job, plan=plan, seconds=time.perf_counter() - started)
