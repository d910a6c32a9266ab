"""The batch of a file, planned, and stock verl's layout of the same rows to compare the plan
with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from verl_padding.cli.batch_reader import FileBatch
from verl_padding.cli.charts import planned_chart
from verl_padding.cli.page import ShownStep
from verl_padding.cli.stock_layout import pack_as_verl, pad_tokens_of_verl, verl_layout
from verl_padding.job.calls import ACTOR
from verl_padding.plan import BatchPlan, Job, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import up_to_multiple
from verl_padding.plan.layout import Layout, RowsMDK
from verl_padding.plan.mini_batch_costs import MiniBatchCost, mini_batch_costs
from verl_padding.plan.planner import costs_of
from verl_padding.record.data_errors import as_data_error

VERL, PLAN = "verl", "plan"
"""Layouts that are compared."""


@dataclass(frozen=True, kw_only=True)
class CutLayout:
    """A layout of a batch, cut into micro-batches, and the costs of its rows and pads."""

    rows_MDK: RowsMDK
    costs: CallCosts
    is_cut: bool = True
    """False if the workers cut the micro-batches: each local mini-batch is one here."""

    @property
    def by_micro(self) -> bool:
        """Whether ranks wait for each other at each of these micro-batches, not once a step."""
        return self.is_cut and self.costs.call.sync_point == "micro_batch"

    @cached_property
    def steps(self) -> list[MiniBatchCost]:
        return mini_batch_costs(self.rows_MDK, self.costs)

    def figures(self, steps: Sequence[MiniBatchCost]) -> dict[str, float]:
        """Some steps, or all, in numbers, which docs/reference.md explains."""
        # Ranks that cost 4 + 2 and 1 + 3 in two micro-batches take 4 + 3 where they wait for each
        # other at each, and 6 where they do so once: 1.4 or 1.2 times the mean rank.
        slowest = sum(step.micro_slowest if self.by_micro else step.mini_slowest for step in steps)
        time = slowest * steps[0].ranks
        return {
            "optimizer_steps": len(steps),
            "rows": sum(step.real_rows for step in steps),
            "pads": sum(step.pads for step in steps),
            "tokens": sum(step.real_tokens for step in steps),
            "pad_tokens": sum(step.tokens - step.real_tokens for step in steps),
            "computed_tokens": sum(step.computed_tokens for step in steps),
            "micro_batches": sum(step.micro_batches for step in steps),
            "imbalance": time / sum(step.cost for step in steps),
            "over_perfect": time / int(self.costs.cost_R.sum()),
        }


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The batch of a file, and its plan."""

    batch: FileBatch
    job: Job
    plan: BatchPlan
    layouts: Mapping[str, CutLayout]
    """The layout of each worker call, and those that are compared."""

    def shown_step(self) -> ShownStep:
        """What a page shows of it."""
        charts = {
            name: planned_chart(layout.rows_MDK, layout.costs, is_cut=layout.is_cut)
            for name, layout in self.layouts.items()
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
        name: CutLayout(
            rows_MDK=plan.layouts[name].rows_MDK,
            costs=costs_of(batch.rows, job, call),
            is_cut=plan.layouts[name].cut_by != "verl",
        )
        for name, call in job.calls()
    }
    if compare:
        with as_data_error("--compare", "a batch that stock verl takes", "Leave --compare out"):
            layouts |= _compared(plan.layouts[ACTOR], layouts[ACTOR].costs, job)
    return PlannedBatch(batch=batch, job=job, plan=plan, layouts=layouts)


def _compared(layout: Layout, costs: CallCosts, job: Job) -> dict[str, CutLayout]:
    """Stock verl's layout of the actor's update, and the plan's, cut into micro-batches."""
    budget = costs.call.token_budget
    if budget is None or costs.call.padded_to != "row":
        raise ValueError("its layout is known for packed rows with a token budget")
    tokens_R = costs.tokens_R.tolist()
    stock_MDK = verl_layout(
        tokens_R,
        dp_size=layout.dp_size,
        mini_batch_rows=job.updates[ACTOR].prompts_per_mini_batch * job.sessions_per_prompt,
        token_budget=budget,
    )
    plan_MDK: RowsMDK = layout.rows_MDK
    if layout.cut_by == "verl":  # verl's packer cuts them, in the workers
        padded_R = [*tokens_R, *[job.pad_tokens] * layout.n_pads]
        plan_MDK = [
            pack_as_verl(local_batches_D, padded_R, budget)
            for local_batches_D in layout.local_batches
        ]
    stock_costs = replace(costs, tries=None, pad_tokens=pad_tokens_of_verl())
    return {
        VERL: CutLayout(rows_MDK=stock_MDK, costs=stock_costs),
        PLAN: CutLayout(rows_MDK=plan_MDK, costs=costs),
    }
