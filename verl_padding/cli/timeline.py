"""``verl-padding timeline``: what the micro-batches of a step took, as a table, a picture and a trace."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl_padding.errors import PaddingDataError
from verl_padding.timing.laps import TimedStep, chrome_trace, imbalance_and_waiting, read_steps

CAPTION = "micro: micro-batches of a rank; waited: seconds of the mean rank; GB: most memory of a process in the call"


def show_timeline(file: Path, *, update: int, picture: Path | None, trace: Path | None) -> None:
    """Prints the table, and writes what is asked for.

    Args:
        file: of a step.
        update: which local update of the step, from 0; the trace has all.
    """
    steps = list(read_steps(file))
    if update >= len(steps):
        raise PaddingDataError(f"--update {update}: {file} has {len(steps)}, counted from 0. Choose one of them.")
    timed = steps[update]
    if not timed.laps:
        raise PaddingDataError(f"{file}: holds no lap: no worker call had a batch in this step. Name another step.")
    Console().print(_table(timed))
    if picture is not None:
        from verl_padding.cli.timeline_picture import draw_timeline

        draw_timeline(timed, picture)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(steps)))


def _table(timed: TimedStep) -> Table:
    table = Table(title=f"step {timed.step}, {len(timed.keys)} rows", title_justify="left", caption=CAPTION)
    table.add_column("call", no_wrap=True)
    for name in ("ranks", "micro", "seconds", "forward", "waited", "imbalance", "tokens/s", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for call, laps in timed.by_call().items():
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
