"""Charts of micro-batches, for the page: by the clock, by tokens, or by what a plan reckons."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Layout
from verl_padding.record.step_file import Place, RecordedStep
from verl_padding.record.timings import MicroBatchTiming


class Bar(NamedTuple):
    """A micro-batch on a rank."""

    rank: int
    mini_batch: int
    micro_batch: int | None
    """None where verl's packer cuts the micro-batches, in the workers."""
    start: float
    busy: float
    length: float
    """From its start until the slowest rank is ready: what is not busy is waiting."""
    rows: Sequence[int]
    pads: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The bars of a worker call, or of a layout, and what their lengths measure."""

    unit: str
    bars: Sequence[Bar]


def timed_chart(timings: Sequence[MicroBatchTiming]) -> Chart:
    """The timings of a call, by the clock."""
    # Clocks of nodes may differ by some milliseconds; the first start of all is 0.
    first_s = min(timing.start_s for timing in timings)
    bars = [
        Bar(
            timing.rank,
            timing.mini_batch,
            timing.micro_batch,
            timing.start_s - first_s,
            timing.seconds,
            timing.seconds,
            timing.rows,
            timing.pads,
            timing.tokens,
        )
        for timing in timings
    ]
    return Chart(unit="seconds", bars=bars)


def token_chart(update: RecordedStep, call: str) -> Chart:
    """The rows of each micro-batch, as long as their tokens; the record does not have the pads."""
    held: dict[Place, list[int]] = {}
    for row in update.rows:
        if call in row.places:
            held.setdefault(row.places[call], []).append(row.row)
    bars = []
    for place, rows in held.items():
        tokens = sum(update.rows[row].tokens for row in rows)
        bars.append(
            Bar(place.rank, place.mini_batch, place.micro_batch, 0, tokens, 0, rows, 0, tokens)
        )
    return Chart(unit="tokens of rows", bars=one_after_the_other(bars))


def planned_chart(layout: Layout, costs: CallCosts) -> Chart:
    """A layout, by what its rows and pads cost."""
    # Costs are large integers without a unit; a row of 1000 tokens makes them readable.
    unit = costs.row_cost(1000)
    bars = []
    for mini_batch, rows_DK in enumerate(layout.rows_MDK):
        _, load_DK = costs.micro_batch_loads(rows_DK)
        for rank, (rows_K, load_K) in enumerate(zip(rows_DK, load_DK.tolist(), strict=True)):
            for micro_batch, (rows, load) in enumerate(zip(rows_K, load_K, strict=True)):
                real = [row for row in rows if row < costs.n_rows]
                pads = len(rows) - len(real)
                tokens = int(costs.tokens_R[real].sum()) + pads * costs.pad_tokens
                number = None if layout.cut_by == "verl" else micro_batch
                bars.append(Bar(rank, mini_batch, number, 0, load / unit, 0, real, pads, tokens))
    return Chart(unit="cost, in rows of 1000 tokens", bars=one_after_the_other(bars))


def one_after_the_other(bars: Sequence[Bar]) -> list[Bar]:
    """The bars with their starts and lengths: a micro-batch begins when all ranks are ready with
    the one before.

    Two ranks that are busy for 3 and 2, and then for 1 and 4, wait for 0 and 1, and then for 3 and
    0: both are ready at 3, and then at 7.
    """
    # verl's packer cuts local mini-batches in the workers: then a local mini-batch is one
    # micro-batch here.
    places = [(bar.mini_batch, bar.micro_batch or 0) for bar in bars]
    longest: dict[tuple[int, int], float] = {}
    for bar, at in zip(bars, places, strict=True):
        longest[at] = max(longest.get(at, 0), bar.busy)
    starts, end = {}, 0.0
    for at in sorted(longest):
        starts[at], end = end, end + longest[at]
    return [
        bar._replace(start=starts[at], length=longest[at])
        for bar, at in zip(bars, places, strict=True)
    ]
