"""Ways to lay a batch out: verl's, with its own functions, two textbook ones, and the plan."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

from benchmarks.jobs import BatchJob
from verl_padding.plan import COST_MODELS, BatchPlan, Job, Rows, Update, plan_batch

VERL_PAD_TOKENS = 128
"""Tokens of a pad of verl 0.9."""

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
        mini = micro = count = 0
        for bins_D in bins_MD:
            load_DK = [[_cost(rows) for rows in bins] for bins in bins_D]
            assert len({len(loads) for loads in load_DK}) == 1, "ranks with different numbers of micro-batches hang"
            mini += max(map(sum, load_DK))
            micro += sum(map(max, zip(*load_DK, strict=True)))
            count += len(load_DK[0])
        return cls(mini_slowest=mini, micro_slowest=micro, micro_batches=count, pads=pads, steps=len(bins_MD))


@dataclass(frozen=True, kw_only=True)
class VerlCells:
    """Rows of each mini-batch and rank as verl 0.9.1 deals them out; numbers from ``len(job.tokens_R)`` on are pads."""

    cells: list[list[list[int]]]
    pads: int


def verl_cells(job: BatchJob, steps: int | None = None) -> VerlCells:
    """verl 0.9.1: pads at the end, ranks balanced over the whole batch, each rank's rows cut in their order.

    Args:
        steps: force so many steps, of as many rows as that takes; None for verl's own number.
    """
    size = job.mini_batch_rows
    if steps is not None:
        size = -(-len(job.tokens_R) // (steps * job.dp_size)) * job.dp_size
    total = -(-len(job.tokens_R) // lcm(size, job.dp_size)) * lcm(size, job.dp_size)
    padded = job.tokens_R + [VERL_PAD_TOKENS] * (total - len(job.tokens_R))
    cost = attention_cost(np.array(padded)).tolist()
    # A list, where verl hands over a tensor: the same partitions, many times faster.
    chunks = get_seqlen_balanced_partitions(cost, k_partitions=job.dp_size, equal_size=True)
    cell = size // job.dp_size
    return VerlCells(
        cells=[[chunk[step * cell : (step + 1) * cell] for chunk in chunks] for step in range(total // size)],
        pads=total - len(job.tokens_R),
    )


def verl(job: BatchJob, dealt: VerlCells) -> Laid:
    """verl's cells, cut into micro-batches by its packer."""
    tokens = job.tokens_R + [VERL_PAD_TOKENS] * dealt.pads
    bins_MD = [
        _verl_micro_batches([[tokens[row] for row in cell] for cell in ranks], job.token_budget)
        for ranks in dealt.cells
    ]
    return Laid.of(bins_MD, pads=dealt.pads)


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
    """Each mini-batch into the micro-batches of first-fit-decreasing, dealt to the ranks from dear to cheap."""
    bins_MD = []
    for rows in _mini_batches(job, steps):
        bins: Bins = []
        free: list[int] = []
        for tokens in sorted(rows, reverse=True):
            at = next((number for number, left in enumerate(free) if left >= tokens), None)
            if at is None:
                bins.append([tokens])
                free.append(job.token_budget - tokens)
            else:
                bins[at].append(tokens)
                free[at] -= tokens
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
    rows = Rows.from_keys([f"{name}_0_{row}" for row, name in enumerate(names)], job.tokens_R)
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
    for mini_batch, ranks in enumerate(layout.cells):
        if packer == "verl":
            bins_MD.append(_verl_micro_batches([[tokens[row] for row in cell] for cell in ranks], job.token_budget))
        else:
            cut_D = [layout.micro_batches(mini_batch, rank) for rank in range(layout.dp_size)]
            bins_MD.append([[[tokens[row] for row in rows] for rows in cut] for cut in cut_D])
    return Laid.of(bins_MD, pads=layout.n_pads)


def lower_bound(job: BatchJob) -> float:
    """The real rows' cost shared out evenly.

    However rows are cut into mini-batches and micro-batches: in each, the slowest rank costs at least the mean of the
    ranks, and the means add up to this.
    """
    return float(attention_cost(np.array(job.tokens_R)).sum()) / job.dp_size


def _cost(tokens: Sequence[int]) -> int:
    return sum(24576 * length + length * length for length in tokens)


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


def _verl_micro_batches(cells: list[list[int]], budget: int) -> list[Bins]:
    """verl's own packer on every rank. Its ranks agree on a number of micro-batches that fits all: so do these."""
    n_bins = 1
    while True:
        bins_D = [_verl_pack(cell, budget, n_bins) for cell in cells]
        most = max(map(len, bins_D))
        if all(len(bins) == most for bins in bins_D):
            return bins_D
        n_bins = most


def _verl_pack(cell: list[int], budget: int, at_least: int) -> Bins:
    offsets = torch.tensor([0, *np.cumsum(cell).tolist()])
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int8), offsets)
    _, rows_K = rearrange_micro_batches(
        TensorDict({"input_ids": ids}, batch_size=len(cell)), max_token_len=budget, min_num_micro_batch=at_least
    )
    return [[cell[row] for row in rows] for rows in rows_K]
