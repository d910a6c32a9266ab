"""The batch of a file, planned, and other layouts of the same rows to compare the plan with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from verl_padding.cli.rows_file import RowsFile
from verl_padding.job.calls import ACTOR
from verl_padding.plan import BatchPlan, Job, PlanError, Update, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import MiniBatchCost, RowsMDK, micro_batches_of, mini_batch_costs
from verl_padding.plan.planner import costs_of
from verl_padding.stock.padding import VERL_PAD_TOKENS, Track, pack_as_verl, verl_layout

VERL, PLAN, UNSHARED = "verl", "plan", "plan_without_sharing"
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
        """What its optimizer steps cost."""
        return mini_batch_costs(self.rows_MDK, self.costs, with_micro_bounds=self.is_cut)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The batch of a file, and its plan."""

    batch: RowsFile
    job: Job
    plan: BatchPlan
    seconds: float  # of planning

    @classmethod
    def of(cls, batch: RowsFile, job: Job) -> PlannedBatch:
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
        """The call that is planned."""
        return self.job.updates[ACTOR]

    @property
    def layout(self) -> Layout:
        """Which row goes where."""
        return self.plan.layouts[ACTOR]

    @cached_property
    def planned(self) -> CutLayout:
        """The plan's layout."""
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
        if self.job.sharing != "off":
            layout = plan_batch(rows, replace(self.job, sharing="off")).layouts[ACTOR]
            layouts[UNSHARED] = CutLayout(rows_MDK=micro_batches_of(layout), costs=unshared)
        if self.planned.is_cut:
            return layouts | {PLAN: self.planned}
        tokens_R = [*rows.tokens_R, *[self.job.pad_tokens] * self.plan.n_pads]
        steps = range(self.layout.n_mini_batches)
        packed_MDK = [pack_as_verl(self.layout.cells[step], tokens_R, budget) for step in track(steps)]
        return layouts | {PLAN: CutLayout(rows_MDK=packed_MDK, costs=costs)}


def sharing_of(steps: Sequence[MiniBatchCost]) -> str:
    """How many tokens are computed where rows share prefixes."""
    tokens, computed = sum(step.real_tokens for step in steps), sum(step.computed_tokens for step in steps)
    return f"{computed:,} of {tokens:,} tokens computed: sharing factor {tokens / computed:.2f}"
