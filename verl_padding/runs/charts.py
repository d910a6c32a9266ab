"""What all charts have in common: the colours of stock verl and of the plug-in, and how a chart is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.errors import PaddingDataError

STOCK, STOCK_LIGHT = "tab:orange", "#ffbb78"
"""Stock verl, and what has to be told apart from it beside it."""
OURS, OURS_LIGHT = "tab:blue", "#aec7e8"
"""The plug-in, and what has to be told apart from it beside it."""
PADS = "#333333"
WAITING = {"facecolor": "white", "edgecolor": "#bbbbbb", "hatch": "////", "linewidth": 0}
"""How the time is drawn that a rank waits."""
NEITHER = "tab:gray"
"""What is the same with and without the plug-in."""


def new_figure(**options: Any) -> tuple[Any, Any]:
    """A figure with its axes, as ``pyplot.subplots`` makes them; it takes no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(**options)


def patch(**look: Any) -> Any:
    """A patch of colour for a legend."""
    from matplotlib.patches import Patch

    return Patch(**look)


def start_at_zero(axes: Any) -> None:
    """Lets the y axis start at 0, unless a line goes below it; a line at the top is whole."""
    axes.margins(y=0.05)
    if all(np.nanmin(line.get_ydata(), initial=0) >= 0 for line in axes.lines):
        axes.set_ylim(bottom=0)


def whole_numbers(axis: Any) -> None:
    """Labels an axis of steps with whole numbers, also where there are few of them."""
    axis.get_major_locator().set_params(integer=True)


def refuse_unwritable(path: Path) -> None:
    """Refuses a picture that could not be written, before the work that it is made of.

    Raises:
        PaddingDataError: there is no such folder, or no such kind of picture.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    # os.path, for Path raises an error where a folder on the way cannot be searched.
    if os.path.isdir(path):
        why = "it is a folder"
    elif not os.path.isdir(path.parent):
        why = f"{path.parent} is not a folder"
    elif not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        why = "permission denied"
    elif path.suffix and path.suffix[1:].lower() not in kinds:
        why = f"a picture is one of {', '.join(sorted(kinds))}"
    else:
        return
    raise _unwritable(path, why)


def save_chart(figure: Any, path: Path) -> None:
    """Writes a figure, of the kind that its name ends in, PNG without an ending; and closes it.

    Raises:
        PaddingDataError: it cannot be written.
    """
    from matplotlib import pyplot

    try:
        # matplotlib adds an ending to a name without one, unless the kind is named.
        figure.savefig(path, dpi=120, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise _unwritable(path, str(error)) from error
    finally:
        pyplot.close(figure)


def _unwritable(path: Path, why: str) -> PaddingDataError:
    return PaddingDataError(f"--picture {path}: cannot be written ({why}). Name another, such as picture.png.")
