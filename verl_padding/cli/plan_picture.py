"""A picture of a plan: each step's ranks as bars, cut into micro-batches, with the time that ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_padding.errors import PaddingDataError
from verl_padding.plan.cost import CostModel

MOST_STEPS, MOST_RANKS, MOST_BARS = 6, 64, 128
"""More are not drawn: with many ranks, fewer steps, so that the picture fits a screen or two."""

ROWS, OTHER_ROWS, PADS = "#3b6ea5", "#6f9bc8", "#e07b39"


def draw_plan(
    rows_MDK: Sequence[Sequence[Sequence[Sequence[int]]]],
    tokens_R: Sequence[int],
    *,
    n_rows: int,
    cost_model: CostModel,
    path: Path,
) -> None:
    """Draws the first steps, micro-batch after micro-batch; a micro-batch begins when all ranks are ready.

    Args:
        rows_MDK: row numbers of the micro-batches of each step and rank.
        tokens_R: tokens of each row, pads behind the ``n_rows`` real ones.
        path: picture, of a kind that matplotlib writes.

    Raises:
        PaddingDataError: the picture cannot be written there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cost_R = cost_model(np.array(tokens_R, dtype=np.int64))
    unit = float(cost_model(np.array([1000], dtype=np.int64))[0])
    ranks = min(len(rows_MDK[0]), MOST_RANKS)
    drawn = rows_MDK[: min(MOST_STEPS, MOST_BARS // ranks)]
    figure, axes_M = pyplot.subplots(
        len(drawn),
        1,
        sharex=True,
        squeeze=False,
        figsize=(10, 1 + len(drawn) * (0.8 + 0.16 * ranks)),
        layout="constrained",
    )
    for step, (axes, rows_DK) in enumerate(zip(axes_M[:, 0], drawn, strict=True)):
        load_DK = np.array([[cost_R[rows].sum() for rows in rows_K] for rows_K in rows_DK]) / unit
        heights = load_DK.max(axis=0)
        starts = np.cumsum(heights) - heights
        for rank, rows_K in enumerate(rows_DK[:ranks]):
            for number, (start, rows) in enumerate(zip(starts, rows_K, strict=True)):
                real = cost_R[[row for row in rows if row < n_rows]].sum() / unit
                pads = load_DK[rank, number] - real
                colour = OTHER_ROWS if number % 2 else ROWS
                axes.barh(rank, real, left=start, color=colour, edgecolor="white", linewidth=0.6)
                # A pad may be narrower than a line: its edge makes it visible.
                if pads:
                    axes.barh(rank, pads, left=start + real, color=PADS, edgecolor=PADS, linewidth=1.2)
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.set_ylabel(f"step {step}\nrank")
    axes_M[-1, 0].set_xlabel("cost, in rows of 1000 tokens")
    left_out = (
        ""
        if (len(drawn), ranks) == (len(rows_MDK), len(rows_MDK[0]))
        else (f" (first {len(drawn)} of {len(rows_MDK)} steps, {ranks} of {len(rows_MDK[0])} ranks)")
    )
    figure.suptitle(f"micro-batches of each rank; white is waiting{left_out}")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (ROWS, PADS)]
    figure.legend(handles, ["rows", "pads"], loc="outside lower right", ncols=2, frameon=False)
    try:
        # matplotlib adds an ending to a name without one, unless the kind is named.
        figure.savefig(path, dpi=120, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise PaddingDataError(
            f"--picture {path}: cannot be written ({error}). Name another, such as plan.png."
        ) from error
    finally:
        pyplot.close(figure)
