"""The batch of a file, planned, and stock verl's layout of the same rows to compare the plan
with."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl_padding.cli.batch_reader import FileBatch
from verl_padding.cli.page import ShownStep, planned_chart
from verl_padding.cli.stock_layout import pack_as_verl, pad_tokens_of_verl, verl_layout
from verl_padding.job.calls import ACTOR
from verl_padding.plan import BatchPlan, Job, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.layout import Layout, RowsMDK
from verl_padding.plan.mini_batch_costs import MiniBatchCost, mini_batch_costs, score_layout
from verl_padding.plan.planner import costs_of
from verl_padding.record.files import as_data_error

VERL, PLAN = "verl", "plan"
"""Layouts that are compared."""


@dataclass(frozen=True, kw_only=True)
class CostedLayout:
    """A layout of a batch, and the costs of its rows and pads."""

    layout: Layout
    costs: CallCosts

    @property
    def steps(self) -> list[MiniBatchCost]:
        return mini_batch_costs(self.layout.rows_MDK, self.costs)

    @property
    def time_of_a_step(self) -> str:
        """Which cost of a step its time is: ranks wait for each other at each micro-batch, or once
        a step; so they do here if the workers cut the micro-batches."""
        waits = self.costs.call.sync_point == "micro_batch" and self.layout.cut_by != "verl"
        return "micro_slowest" if waits else "mini_slowest"

    def compared(self) -> dict[str, Any]:
        """Its figures, and its time over that of ranks that never wait, and compute each real row
        and no pad."""
        time = sum(getattr(step, self.time_of_a_step) for step in self.steps)
        over_perfect = time * self.layout.dp_size / int(self.costs.cost_R.sum())
        return asdict(score_layout(self.layout, self.costs)) | {"over_perfect": over_perfect}


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The batch of a file, and its plan."""

    batch: FileBatch
    job: Job
    plan: BatchPlan
    layouts: Mapping[str, CostedLayout]
    """The layout of each worker call, and those that are compared."""

    def comparison(self) -> dict[str, dict[str, Any]]:
        """Figures of each layout that is compared; nothing if none is."""
        names = [name for name in (VERL, PLAN) if name in self.layouts]
        return {name: self.layouts[name].compared() for name in names}

    def shown_step(self) -> ShownStep:
        """What a page shows of it."""
        charts = {
            name: planned_chart(each.layout, each.costs) for name, each in self.layouts.items()
        }
        rows = self.batch.rows
        columns = {"tokens": rows.tokens_R}
        if rows.tries is not None:
            columns["shared_tokens"] = tuple(rows.tries.shared_R.tolist())
        return ShownStep(
            name=self.batch.name, keys=rows.key_R, columns=columns, charts=charts, tries=rows.tries
        )


def plan_file_batch(batch: FileBatch, job: Job, *, compare: bool) -> PlannedBatch:
    """Plans a batch, as of a job whose data loader gives its number of prompts, rounded up to whole
    mini-batches.

    Args:
        compare: whether stock verl's layout of the actor's update is wanted, too.

    Raises:
        PaddingDataError: the batch cannot be compared.
        PlanError: it cannot be planned.
    """
    # 15 prompts with mini-batches of 4 are planned as 16, one of which has no rows.
    multiple = math.lcm(*(update.prompts_per_mini_batch for update in job.updates.values()))
    job = replace(job, prompts=up_to_multiple(len(set(batch.rows.prompt_R)), multiple))
    plan = plan_batch(batch.rows, job)
    layouts = {
        name: CostedLayout(layout=plan.layouts[name], costs=costs_of(batch.rows, job, call))
        for name, call in job.calls()
    }
    if compare:
        with as_data_error("--compare", "a batch that stock verl takes", "Leave --compare out"):
            layouts |= _compared(layouts[ACTOR], job)
    return PlannedBatch(batch=batch, job=job, plan=plan, layouts=layouts)


def _compared(planned: CostedLayout, job: Job) -> dict[str, CostedLayout]:
    """Stock verl's layout of the actor's update, and the plan's, cut into micro-batches."""
    layout, costs = planned.layout, planned.costs
    budget, tokens_R = costs.call.token_budget, costs.tokens_R.tolist()
    if budget is None or costs.call.padded_to != "row":
        raise ValueError("its layout is known for packed rows with a token budget")

    def cut(rows_MDK: RowsMDK) -> Layout:
        as_tuples = tuple(
            tuple(tuple(map(tuple, rows_K)) for rows_K in rows_DK) for rows_DK in rows_MDK
        )
        return Layout(n_rows=layout.n_rows, rows_MDK=as_tuples, cut_by="tokens")

    stock_MDK = verl_layout(
        tokens_R,
        dp_size=layout.dp_size,
        mini_batch_rows=job.updates[ACTOR].prompts_per_mini_batch * job.sessions_per_prompt,
        token_budget=budget,
    )
    stock_costs = replace(costs, tries=None, pad_tokens=pad_tokens_of_verl())
    if layout.cut_by == "verl":  # verl's packer cuts them, in the workers
        padded_R = [*tokens_R, *[job.pad_tokens] * layout.n_pads]
        layout = cut([pack_as_verl(each, padded_R, budget) for each in layout.local_batches])
    return {
        VERL: CostedLayout(layout=cut(stock_MDK), costs=stock_costs),
        PLAN: CostedLayout(layout=layout, costs=costs),
    }
