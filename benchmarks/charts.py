"""What all charts have in common: the colours of stock verl and of the plug-in, and how a chart is
written."""

from pathlib import Path
from typing import Any

import numpy as np

STOCK, STOCK_LIGHT = "tab:orange", "#ffbb78"
OURS, OURS_LIGHT = "tab:blue", "#aec7e8"
"""Stock verl and the plug-in, and what has to differ from each beside it."""
PADS = "#333333"
WAITING = {"facecolor": "white", "edgecolor": "#bbbbbb", "hatch": "////", "linewidth": 0}


def new_figure(**options: Any) -> tuple[Any, Any]:
    """A figure with its axes and room for a legend, as ``pyplot.subplots`` makes them; it takes no
    display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained", **options)


def start_at_zero(axes: Any) -> None:
    """Lets the y axis start at 0, unless a line goes below it; a line at the top is whole."""
    axes.margins(y=0.05)
    if all(np.nanmin(line.get_ydata(), initial=0) >= 0 for line in axes.lines):
        axes.set_ylim(bottom=0)


def draw_bar(
    axes: Any, rank: int, start: float, rows: float, pads: float, waiting: float, *, colour: str
) -> None:
    """Draws what a rank does in a micro-batch, from ``start`` on: its rows, its pads, and waiting
    for other ranks."""
    axes.barh(rank, rows, left=start, color=colour, edgecolor="white", linewidth=0.6)
    # Pads may be narrower than a line: their edge makes them visible.
    if pads:
        axes.barh(rank, pads, left=start + rows, color=PADS, edgecolor=PADS, linewidth=1.2)
    if waiting:
        axes.barh(rank, waiting, left=start + rows + pads, **WAITING)


def add_legend(figure: Any, looks: dict[str, dict[str, Any]]) -> None:
    """A legend of patches below the axes, each with its look."""
    from matplotlib.patches import Patch

    handles = [Patch(**look) for look in looks.values()]
    figure.legend(handles, [*looks], loc="outside lower right", ncols=len(handles), frameon=False)


def save_chart(figure: Any, path: Path) -> None:
    """Writes a figure, of the kind that its name ends in, PNG without an ending; and closes it."""
    from matplotlib import pyplot

    # matplotlib adds an ending to a name without one, unless the kind is named.
    figure.savefig(path, dpi=120, format=path.suffix[1:] or "png")
    pyplot.close(figure)
