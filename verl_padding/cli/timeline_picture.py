"""A picture of laps: ranks over time, a bar for each micro-batch."""

from itertools import cycle
from pathlib import Path
from typing import Any

from verl_padding.plan.counted import counted
from verl_padding.runs.charts import OURS, OURS_LIGHT, PADS, WAITING, add_legend, draw_bar, new_figure, save_chart
from verl_padding.timing.laps import Lap, TimedStep

MOST_RANKS = 64


def draw_timeline(timed: TimedStep, path: Path) -> None:
    """Draws the calls of a step below each other, each with its ranks over its own seconds.

    A bar is as long as its lap. What the rank waited in it is hatched, at its end, and the share of pads before that
    is dark; where waiting is not known, the bar is whole.
    """
    calls = timed.by_call()
    ranks = min(max(lap.rank for lap in timed.laps) + 1, MOST_RANKS)
    figure, axes_C = new_figure(
        nrows=len(calls), squeeze=False, figsize=(12, 1 + len(calls) * (0.9 + 0.16 * ranks)), layout="constrained"
    )
    for axes, (call, laps) in zip(axes_C[:, 0], calls.items(), strict=True):
        first = min(lap.start_s for lap in laps if lap.rank < ranks)
        for rank in range(ranks):
            of_rank = [lap for lap in laps if lap.rank == rank]
            for lap, colour in zip(of_rank, cycle((OURS, OURS_LIGHT)), strict=False):
                _draw_lap(axes, lap, lap.start_s - first, colour)
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("rank")
        mini_batches = 1 + max(lap.mini_batch for lap in laps)
        axes.set_title(f"{call}: {counted(mini_batches, 'mini-batch')}", loc="left", fontsize="medium")
    axes_C[-1, 0].set_xlabel("seconds")
    figure.suptitle(f"step {timed.step}")
    add_legend(figure, {"micro-batches": {"facecolor": OURS}, "pads": {"facecolor": PADS}, "waiting": WAITING})
    save_chart(figure, path)


def _draw_lap(axes: Any, lap: Lap, start: float, colour: str) -> None:
    pads = lap.known_busy_s * sum(sorted(lap.computed_tokens)[: lap.pads]) / max(lap.tokens, 1)
    waited = lap.seconds - lap.known_busy_s
    draw_bar(axes, lap.rank, start, lap.known_busy_s - pads, pads, waited, colour=colour)
