"""Timings: what each micro-batch took on each rank, and their figures."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verl_padding.plan.cost import CostModel
from verl_padding.record.files import Count, Number


@dataclass(frozen=True, kw_only=True)
class MicroBatchTiming:
    """One micro-batch on one rank, backward pass included: from its start to that of the next one,
    or the call's end.

    In a pipeline, where the passes of micro-batches alternate, a timing is a whole mini-batch.
    """

    call: str
    rank: Count
    """Data-parallel rank."""
    mini_batch: Count
    """Its number in the call, from 0, continuing over epochs."""
    micro_batch: Count
    """Its number in the mini-batch, from 0."""
    start_s: Number
    """When it began, in seconds since the epoch, by the clock of the rank's node."""
    seconds: Number
    """How long it took, waiting for other ranks included."""
    rows: tuple[Count, ...]
    """Numbers of its real rows in the batch."""
    pads: Count
    computed_tokens: tuple[Count, ...]
    """Tokens of each computed row, pads included; of rows that extend each other, only the longest
    is computed."""
    shared_tokens: tuple[Count, ...] = ()
    """How many of each computed row's tokens were computed in another row; empty if no rows
    branch."""

    @property
    def tokens(self) -> int:
        """Tokens that were computed."""
        return sum(self.computed_tokens) - sum(self.shared_tokens)

    def cost(self, cost_model: CostModel) -> int:
        """The cost of its rows and pads by the plan."""
        shared = [tokens for tokens in self.shared_tokens if tokens]
        computed, cached = (
            np.array(tokens, dtype=np.int64) for tokens in (self.computed_tokens, shared)
        )
        return int(cost_model(computed).sum() - cost_model(cached).sum())


def timings_by_call(timings: Iterable[MicroBatchTiming]) -> dict[str, list[MicroBatchTiming]]:
    """The timings of each call, calls and timings in the order in which they began."""
    found: dict[str, list[MicroBatchTiming]] = defaultdict(list)
    for timing in sorted(timings, key=lambda timing: timing.start_s):
        found[timing.call].append(timing)
    return found


def prediction_error(timings: Iterable[MicroBatchTiming], cost_model: CostModel) -> float:
    """How wrong the costs of a call's micro-batches are, as a share of their seconds.

    sum |cost - seconds| / sum seconds, where costs are scaled to the same sum. Ranks wait for each
    other, so a micro-batch of all ranks counts as one, by its costliest rank.
    """
    # For example: costs of 30 and 10 for seconds of 2 and 2. Scaled to a sum of 4 they are 3 and 1,
    # each wrong by 1, so the error is 2 of 4.
    found: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for timing in timings:
        number = timing.mini_batch, timing.micro_batch
        found[number].append((timing.cost(cost_model), timing.seconds))
    cost, seconds = np.array([np.max(rank_pairs, axis=0) for rank_pairs in found.values()]).T
    return float(np.abs(cost * (seconds.sum() / cost.sum()) - seconds).sum() / seconds.sum())
