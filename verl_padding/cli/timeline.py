"""``verl-padding timeline``: what the micro-batches of a step took, as a table, a picture and a trace."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl_padding.errors import PaddingDataError
from verl_padding.plan.counted import counted
from verl_padding.record.step_file import RecordedStep, read_steps
from verl_padding.runs.charts import OURS, OURS_LIGHT, PADS, WAITING, add_legend, draw_bar, new_figure, save_chart
from verl_padding.timing.laps import Lap, chrome_trace, imbalance_and_waiting, laps_by_call

MOST_RANKS = 64  # in a picture
CAPTION = "micro: micro-batches of a rank; waited: seconds of the mean rank; GB: most memory of a process in the call"


def show_timeline(file: Path, *, update: int, picture: Path | None, trace: Path | None) -> None:
    """Prints the table of a local update, counted from 0, and draws it if asked; the trace has all of the step's."""
    steps = read_steps(file)
    if update >= len(steps):
        raise PaddingDataError(f"--update {update}: {file} has {len(steps)}, counted from 0. Choose one of them.")
    timed = steps[update]
    if not timed.laps:
        fix = "Record steps with padding.timing=true, or name one in which a worker call had a batch."
        raise PaddingDataError(f"{file}: holds no lap. {fix}")
    Console().print(_table(timed))
    if picture is not None:
        draw_timeline(timed, picture)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace([lap for step in steps for lap in step.laps])))


def _table(timed: RecordedStep) -> Table:
    table = Table(title=f"step {timed.step}, {len(timed.keys)} rows", title_justify="left", caption=CAPTION)
    table.add_column("call", no_wrap=True)
    for name in ("ranks", "micro", "seconds", "forward", "waited", "imbalance", "tokens/s", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for call, laps in laps_by_call(timed.laps).items():
        by_rank = [[lap for lap in laps if lap.rank == rank] for rank in {lap.rank for lap in laps}]
        slowest = max(by_rank, key=lambda of_rank: sum(lap.seconds for lap in of_rank))
        seconds = sum(lap.seconds for lap in slowest)
        forward = [lap.forward_s for lap in slowest if lap.forward_s is not None]
        known = imbalance_and_waiting(laps)
        imbalance, waited = ("-", "-") if known is None else (f"{known[0]:.3f}", f"{known[1]:.2f}")
        table.add_row(
            call,
            str(len(by_rank)),
            str(len({(lap.mini_batch, lap.micro_batch) for lap in laps})),
            f"{seconds:.2f}",
            f"{sum(forward):.2f}" if forward else "-",
            waited,
            imbalance,
            f"{sum(lap.tokens for lap in laps) / seconds:,.0f}",
            f"{max(lap.reserved_bytes for lap in laps) / 1e9:.2f}",
        )
    return table


def draw_timeline(timed: RecordedStep, path: Path) -> None:
    """Draws the calls of a step below each other, each with its ranks over its own seconds.

    A bar is as long as its lap. What the rank waited in it is hatched, at its end, and the share of pads before that
    is dark; where waiting is not known, the bar is whole.
    """
    calls = laps_by_call(timed.laps)
    ranks = min(max(lap.rank for lap in timed.laps) + 1, MOST_RANKS)
    size = (12, 1 + len(calls) * (0.9 + 0.16 * ranks))
    figure, axes_C = new_figure(nrows=len(calls), squeeze=False, figsize=size)
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
    busy = lap.seconds if lap.busy_s is None else lap.busy_s
    pads = busy * sum(sorted(lap.computed_tokens)[: lap.pads]) / max(lap.tokens, 1)
    draw_bar(axes, lap.rank, start, busy - pads, pads, lap.seconds - busy, colour=colour)
