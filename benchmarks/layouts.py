"""Ways to lay a batch out: verl's, with its own functions, two textbook ones, and the plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.jobs import BatchJob
from verl_padding.plan import COST_MODELS, BatchPlan, Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.mini_batch_costs import mini_batch_costs
from verl_padding.plan.packing.bins import first_fit
from verl_padding.plan.row_keys import row_key
from verl_padding.stock.padding import VERL_PAD_TOKENS, deal_as_verl, pack_as_verl

PAD_TOKENS = 2
attention_cost = COST_MODELS["attention"]

Bins = list[list[int]]
"""Token counts of the rows of each micro-batch of a rank."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """What a layout costs, by verl's cost of a row, pads included."""

    mini_slowest: int
    """Cost of the slowest rank of each mini-batch, summed: what ranks take that meet once a mini-batch."""
    micro_slowest: int
    """Cost of the slowest rank of each micro-batch, summed: what ranks take that meet at each."""
    micro_batches: int
    """Of a rank, over the mini-batches."""
    pads: int
    steps: int

    @classmethod
    def of(cls, bins_MD: Sequence[Sequence[Bins]], *, pads: int) -> Laid:
        for bins_D in bins_MD:
            assert len(set(map(len, bins_D))) == 1, "ranks with different numbers of micro-batches hang"
        # Pads are counted by their tokens too: all that is laid out counts as rows here.
        number = count()
        rows_MDK = [[[[next(number) for _ in rows] for rows in bins] for bins in bins_D] for bins_D in bins_MD]
        tokens = [length for bins_D in bins_MD for bins in bins_D for rows in bins for length in rows]
        costs = CallCosts(
            call=Pass(dp_size=len(bins_MD[0])),
            tokens_R=np.array(tokens, dtype=np.int64),
            cost_model=attention_cost,
            pad_tokens=PAD_TOKENS,
        )
        steps = mini_batch_costs(rows_MDK, costs)
        return cls(
            mini_slowest=sum(step.mini_slowest for step in steps),
            micro_slowest=sum(step.micro_slowest for step in steps),
            micro_batches=sum(step.micro_batches for step in steps),
            pads=pads,
            steps=len(steps),
        )


@dataclass(frozen=True, kw_only=True)
class VerlCells:
    """Rows of each mini-batch and rank as verl 0.9 deals them out; numbers from ``len(job.tokens_R)`` on are pads."""

    cells_MD: list[list[list[int]]]
    pads: int


def verl_cells(job: BatchJob, steps: int | None = None) -> VerlCells:
    """verl's cells at its own number of steps.

    Args:
        steps: force so many steps, of as many rows as that takes.
    """
    size = job.mini_batch_rows
    if steps is not None:
        size = -(-len(job.tokens_R) // (steps * job.dp_size)) * job.dp_size
    cells_MD, pads = deal_as_verl(job.tokens_R, dp_size=job.dp_size, mini_batch_rows=size)
    return VerlCells(cells_MD=cells_MD, pads=pads)


def verl(job: BatchJob, dealt: VerlCells) -> Laid:
    """verl's cells, cut into micro-batches by its packer."""
    tokens = job.tokens_R + [VERL_PAD_TOKENS] * dealt.pads
    bins_MD = [_tokens_of(pack_as_verl(cells_D, tokens, job.token_budget), tokens) for cells_D in dealt.cells_MD]
    return Laid.of(bins_MD, pads=dealt.pads)


def _tokens_of(rows_DK: Sequence[Sequence[Sequence[int]]], tokens_R: Sequence[int]) -> list[Bins]:
    return [[[tokens_R[row] for row in rows] for rows in rows_K] for rows_K in rows_DK]


def least_loaded(job: BatchJob, steps: int) -> Laid:
    """Longest rows first, each to the least loaded rank, then to the least loaded micro-batch with room."""
    bins_MD = []
    for rows in _mini_batches(job, steps):
        ranks = _least_loaded(rows, job.dp_size, None)
        assert ranks is not None
        n_bins = max(1, *(-(-sum(cell) // job.token_budget) for cell in ranks))
        while True:
            bins_D = [_least_loaded(cell, n_bins, job.token_budget) for cell in ranks]
            whole = [bins for bins in bins_D if bins is not None]
            if len(whole) == len(bins_D):
                break
            n_bins += 1
        bins_MD.append([sorted(bins, key=_cost, reverse=True) for bins in whole])
    return Laid.of(bins_MD, pads=0)


def first_fit_decreasing(job: BatchJob, steps: int) -> Laid:
    """Each mini-batch into the micro-batches of first-fit-decreasing, dealt to the ranks from costly to cheap."""
    bins_MD = []
    for rows in _mini_batches(job, steps):
        longest_first = sorted(rows, reverse=True)
        found = first_fit(longest_first, longest_first, job.token_budget)
        bins: Bins = [[longest_first[item] for item in items] for items in found]
        bins.sort(key=_cost, reverse=True)
        bins += [[] for _ in range(-len(bins) % job.dp_size)]
        bins_MD.append([bins[rank :: job.dp_size] for rank in range(job.dp_size)])
    return Laid.of(bins_MD, pads=0)


def plan_of(job: BatchJob, steps: int, packer: str, mini_batch_R: Sequence[int] | None = None) -> BatchPlan:
    """The plan for as many steps; with ``packer=verl``, its micro-batches are left to verl's packer.

    Args:
        mini_batch_R: the mini-batch that each row must be in; None to let the plan cut them, in order.
    """
    names = range(len(job.tokens_R)) if mini_batch_R is None else mini_batch_R
    rows = Rows.from_keys([row_key(name, 0, row) for row, name in enumerate(names)], job.tokens_R)
    update = Update(dp_size=job.dp_size, token_budget=job.token_budget, prompts_per_mini_batch=1)
    shape = Job(
        strategy="rows" if mini_batch_R is None else "prompt",
        prompts=steps,
        sessions_per_prompt=1,
        updates={"actor": update},
        inference={},
        packer=packer,
        pad_tokens=PAD_TOKENS,
    )
    return plan_batch(rows, shape)


def planned(job: BatchJob, steps: int, packer: str, mini_batch_R: Sequence[int] | None = None) -> Laid:
    """The plan, micro-batches cut by ``packer``; see :func:`plan_of`."""
    layout = plan_of(job, steps, packer, mini_batch_R).layouts["actor"]
    tokens = job.tokens_R + [PAD_TOKENS] * layout.n_pads
    bins_MD = []
    for mini_batch, cells_D in enumerate(layout.cells):
        if packer == "verl":
            rows_DK = pack_as_verl(cells_D, tokens, job.token_budget)
        else:
            rows_DK = [layout.micro_batches(mini_batch, rank) for rank in range(layout.dp_size)]
        bins_MD.append(_tokens_of(rows_DK, tokens))
    return Laid.of(bins_MD, pads=layout.n_pads)


def lower_bound(job: BatchJob) -> float:
    """The real rows' cost shared out evenly.

    However rows are cut into mini-batches and micro-batches: in each, the slowest rank costs at least the mean of the
    ranks, and the means add up to this.
    """
    return float(attention_cost(np.array(job.tokens_R)).sum()) / job.dp_size


def _cost(tokens: Sequence[int]) -> int:
    return int(attention_cost(np.array(tokens, dtype=np.int64)).sum())


def _mini_batches(job: BatchJob, steps: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.array(job.tokens_R), steps)]


def _least_loaded(rows: Sequence[int], n_bins: int, budget: int | None) -> Bins | None:
    bins: Bins = [[] for _ in range(n_bins)]
    heap = [(0, number) for number in range(n_bins)]
    for tokens in sorted(rows, reverse=True):
        full = []
        while heap and budget is not None and sum(bins[heap[0][1]]) + tokens > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heap[0]
        bins[number].append(tokens)
        heapq.heapreplace(heap, (load + _cost([tokens]), number))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins
