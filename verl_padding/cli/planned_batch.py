"""The batch of a file, planned, and other layouts of the same rows to compare the plan with."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from verl_padding.cli.rows_file import RowsFile, place
from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.job.calls import ACTOR
from verl_padding.plan import BatchPlan, Job, Packer, PlanError, Sharing, Update, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import CostModel
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import MiniBatchCost, RowsMDK, micro_batches_of, mini_batch_costs
from verl_padding.plan.planner import costs_of
from verl_padding.stock.layout import VERL_PAD_TOKENS, Track, pack_as_verl, refuse_what_verl_refuses, verl_layout

VERL, PLAN, UNSHARED = "verl", "plan", "plan_without_sharing"
"""Layouts that are compared."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command."""

    path: Path
    """A file, a folder of rollout dumps, or ``-``."""
    dp_size: int
    mini_batch: int
    """Prompts of an optimizer step."""
    n: int
    """Rollouts a prompt."""
    budget: int
    """Tokens of a micro-batch on one rank."""
    strategy: str
    packer: Packer
    cost_model: str
    """Name in ``COST_MODELS``, a model, or a file of measured costs."""
    tokenizer: str | None
    """Hugging Face name or folder, to count the tokens of a rollout dump."""
    sharing: Sharing


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

    request: PlanRequest
    batch: RowsFile
    job: Job
    plan: BatchPlan
    seconds: float
    """Time that planning took."""

    @classmethod
    def of(cls, request: PlanRequest, batch: RowsFile, cost_model: CostModel) -> PlannedBatch:
        """Plans a batch, as of a job whose data loader gives its number of prompts, rounded up to whole mini-batches.

        Raises:
            PlanError: it cannot be planned.
        """
        started = time.perf_counter()
        prompts = len(set(batch.rows.prompt_R))
        update = Update(
            dp_size=request.dp_size,
            token_budget=request.budget,
            prompts_per_mini_batch=request.mini_batch,
            mini_batch_setting="--mini-batch",
            cost_model=cost_model,
            budget_setting="--budget",
        )
        job = Job(
            strategy=request.strategy,
            prompts=-(-prompts // request.mini_batch) * request.mini_batch,
            sessions_per_prompt=request.n,
            sessions_setting="--n",
            updates={ACTOR: update},
            inference={},
            packer=request.packer,
            sharing=request.sharing,
            pad_tokens=MIN_PAD_LENGTH,
        )
        try:
            plan = plan_batch(batch.rows, job)
        except PlanError as refusal:
            where = batch.name if refusal.row is None else place(batch.name, batch.lines_R[refusal.row])
            raise PlanError(f"{where}: {refusal}") from refusal
        return cls(request=request, batch=batch, job=job, plan=plan, seconds=time.perf_counter() - started)

    @property
    def layout(self) -> Layout:
        """Which row goes where."""
        return self.plan.layouts[ACTOR]

    @cached_property
    def costs(self) -> CallCosts:
        """What rows and pads cost."""
        return costs_of(self.batch.rows, self.job, self.job.updates[ACTOR])

    @cached_property
    def planned(self) -> CutLayout:
        """The plan's layout."""
        is_cut = self.layout.micro_batch_rows is not None
        return CutLayout(rows_MDK=micro_batches_of(self.layout), costs=self.costs, is_cut=is_cut)

    def compared(self, track: Track) -> dict[str, CutLayout]:
        """Stock verl's layout and the plan's, both cut into micro-batches; verl's packer is slow.

        Args:
            track: wraps the numbers of the optimizer steps, for a progress bar.

        Raises:
            PaddingDataError: stock verl would stop at this batch.
        """
        layouts = {VERL: self._stock(track)}
        if self.job.sharing == "chains":
            layout = plan_batch(self.batch.rows, replace(self.job, sharing="off")).layouts[ACTOR]
            layouts[UNSHARED] = CutLayout(rows_MDK=micro_batches_of(layout), costs=replace(self.costs, chain_R=None))
        return layouts | {PLAN: self.planned if self.planned.is_cut else self._packed_by_verl(track)}

    def _stock(self, track: Track) -> CutLayout:
        shape = {"dp_size": self.request.dp_size, "mini_batch_rows": self.request.mini_batch * self.request.n}
        budget = self.request.budget
        refuse_what_verl_refuses(len(self.batch.rows), **shape, token_budget=budget)
        layout = verl_layout(self.batch.rows.tokens_R, **shape, token_budget=budget, track=track)
        costs = replace(self.costs, pad_tokens=VERL_PAD_TOKENS, chain_R=None)
        return CutLayout(rows_MDK=layout.micro_batches_MD, costs=costs)

    def _packed_by_verl(self, track: Track) -> CutLayout:
        tokens_R = [*self.batch.rows.tokens_R, *[MIN_PAD_LENGTH] * self.plan.n_pads]
        steps = track(range(self.layout.n_mini_batches))
        rows_MDK = [pack_as_verl(self.layout.cells[step], tokens_R, self.request.budget) for step in steps]
        return CutLayout(rows_MDK=rows_MDK, costs=self.costs)
