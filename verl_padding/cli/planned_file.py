"""The batch of a file, planned, and other layouts of the same rows to compare the plan with."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from verl_padding.cli.rows_file import STANDARD_INPUT, RowsFile
from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
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

OPTIONS = {
    "strategy": "--strategy",
    "packer": "--packer",
    "sharing": "--sharing",
    "dp_size": "--dp",
    "token_budget": "--budget",
}
"""Word of the planner -> option of the command."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the command is asked for."""

    path: Path
    """A file, a folder of rollout dumps, or ``-``."""
    dp_size: int
    mini_batch: int
    """Prompts of an optimizer step."""
    n: int
    """Rollouts a prompt."""
    budget: int
    """Tokens of a micro-batch on one rank."""
    strategy: str = PaddingConfig.strategy
    packer: Packer = PaddingConfig.packer
    cost_model: str = PaddingConfig.cost_model
    """Name in ``COST_MODELS``, a folder with the config.json of a model, or a file of measured costs."""
    tokenizer: str | None = None
    """Hugging Face name or folder, to count the tokens of a rollout dump."""
    sharing: Sharing = PaddingConfig.sharing

    @property
    def is_folder(self) -> bool:
        """Whether there may be several batches: the dumps of a folder."""
        return self.path != STANDARD_INPUT and os.path.isdir(self.path)

    @property
    def mini_batch_rows(self) -> int:
        """Rows of a mini-batch of stock verl."""
        return self.mini_batch * self.n


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A layout of a batch, cut into micro-batches, and the costs of its rows and pads."""

    rows_MDK: RowsMDK
    """Of all optimizer steps, or of the first ones."""
    n_steps: int
    """All optimizer steps."""
    costs: CallCosts

    @cached_property
    def steps(self) -> list[MiniBatchCost]:
        """What its optimizer steps cost."""
        assert len(self.rows_MDK) == self.n_steps, "only the first ones are cut"
        return mini_batch_costs(self.rows_MDK, self.costs)


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """The batch of a file, and its plan."""

    request: PlanRequest
    batch: RowsFile
    job: Job
    plan: BatchPlan
    seconds: float
    """Time that planning took."""

    @classmethod
    def of(cls, request: PlanRequest, batch: RowsFile, cost_model: CostModel) -> PlannedFile:
        """Plans a batch.

        Raises:
            PlanError: it cannot be planned.
        """
        started = time.perf_counter()
        job = _job(request, batch, cost_model)
        plan = _planned(batch, job)
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
    def steps(self) -> list[MiniBatchCost]:
        """What the optimizer steps cost; a cell that verl's packer cuts in the workers is one micro-batch here."""
        is_cut = self.layout.micro_batch_rows is not None
        return mini_batch_costs(micro_batches_of(self.layout), self.costs, with_micro_bounds=is_cut)

    def refuse_comparison(self) -> None:
        """
        Raises:
            PaddingDataError: stock verl would stop at this batch.
        """
        refuse_what_verl_refuses(
            len(self.batch.rows),
            dp_size=self.request.dp_size,
            mini_batch_rows=self.request.mini_batch_rows,
            token_budget=self.request.budget,
        )

    def laid_out(self, track: Track, *, most_steps: int | None = None) -> LaidOut:
        """The plan, cut into micro-batches, by verl's packer (slow) if the plan does not cut them.

        Args:
            track: wraps the numbers of the optimizer steps, for a progress bar.
            most_steps: if not None, verl's packer cuts no more than these, the first ones.
        """
        n_steps = self.layout.n_mini_batches
        if self.layout.micro_batch_rows is not None:
            return LaidOut(rows_MDK=micro_batches_of(self.layout), n_steps=n_steps, costs=self.costs)
        tokens_R = [*self.batch.rows.tokens_R, *[MIN_PAD_LENGTH] * self.plan.n_pads]
        steps = track(range(n_steps)[:most_steps])
        rows_MDK = [pack_as_verl(self.layout.cells[step], tokens_R, self.request.budget) for step in steps]
        return LaidOut(rows_MDK=rows_MDK, n_steps=n_steps, costs=self.costs)

    def unshared(self) -> LaidOut:
        """What the plan would be without sharing."""
        job = replace(self.job, sharing="off")
        layout = plan_batch(self.batch.rows, job).layouts[ACTOR]
        costs = replace(self.costs, chain_R=None)
        return LaidOut(rows_MDK=micro_batches_of(layout), n_steps=layout.n_mini_batches, costs=costs)

    def stock(self, track: Track) -> LaidOut:
        """Stock verl's layout of the same rows (slow)."""
        layout = verl_layout(
            self.batch.rows.tokens_R,
            dp_size=self.request.dp_size,
            mini_batch_rows=self.request.mini_batch_rows,
            token_budget=self.request.budget,
            track=track,
        )
        costs = replace(self.costs, pad_tokens=VERL_PAD_TOKENS, chain_R=None)
        return LaidOut(rows_MDK=layout.micro_batches_MD, n_steps=len(layout.micro_batches_MD), costs=costs)


def _job(request: PlanRequest, batch: RowsFile, cost_model: CostModel) -> Job:
    """A job whose data loader gives as many prompts as the file has, rounded up to whole mini-batches."""
    prompts = len(set(batch.rows.prompt_R))
    try:
        update = Update(
            dp_size=request.dp_size,
            token_budget=request.budget,
            prompts_per_mini_batch=request.mini_batch,
            mini_batch_setting="--mini-batch",
            cost_model=cost_model,
            budget_setting="--budget",
        )
        return Job(
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
    except PlanError as refusal:
        raise PlanError(_with_options(str(refusal))) from refusal


def _with_options(message: str) -> str:
    """A message of the planner, with the options of this command in the place of its own words.

    >>> _with_options("dp_size=0: must be at least 1")
    '--dp 0: must be at least 1'
    """
    return re.sub(r"\b(\w+)=", lambda word: f"{OPTIONS[word[1]]} " if word[1] in OPTIONS else word[0], message)


def _planned(batch: RowsFile, job: Job) -> BatchPlan:
    try:
        return plan_batch(batch.rows, job)
    except PlanError as refusal:
        where = batch.name if refusal.row is None else batch.place(refusal.row)
        raise PlanError(f"{where}: {refusal}", row=refusal.row) from refusal
