"""Timings: what each micro-batch took on each rank."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

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


def timings_by_call(timings: Iterable[MicroBatchTiming]) -> dict[str, list[MicroBatchTiming]]:
    """The timings of each call, calls and timings in the order in which they began."""
    found: dict[str, list[MicroBatchTiming]] = defaultdict(list)
    for timing in sorted(timings, key=lambda timing: timing.start_s):
        found[timing.call].append(timing)
    return found
