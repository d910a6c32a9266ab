"""A picture of a plan: each step's ranks as bars, cut into micro-batches, with the time that ranks wait."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.cli.planned_batch import VERL, CutLayout, sharing_of
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.counted import counted
from verl_padding.plan.mini_batch_costs import micro_batch_loads
from verl_padding.runs import charts

MOST_STEPS, MOST_RANKS, MOST_BARS = 6, 64, 128
"""More are not drawn: with many ranks, fewer steps, so that the picture fits a screen or two."""


def draw_layouts(layouts: Mapping[str, CutLayout], path: Path) -> None:
    """Draws the first steps of layouts of one batch, by their names, side by side, micro-batch after micro-batch.

    A micro-batch begins when all ranks are ready. All steps have one scale, so that they can be compared.
    """
    all_ranks = len(next(iter(layouts.values())).rows_MDK[0])
    ranks = min(all_ranks, MOST_RANKS)
    steps = min(max(len(layout.steps) for layout in layouts.values()), MOST_STEPS, MOST_BARS // ranks)
    figure, axes_MC = charts.new_figure(
        nrows=steps,
        ncols=len(layouts),
        sharex=True,
        squeeze=False,
        figsize=(10 * len(layouts), 1 + steps * (0.8 + 0.16 * ranks)),
        layout="constrained",
    )
    looks: dict[str, dict[str, Any]] = {}
    for column, (name, layout) in enumerate(layouts.items()):
        colours = (charts.STOCK, charts.STOCK_LIGHT) if name == VERL else (charts.OURS, charts.OURS_LIGHT)
        its_steps = min(steps, len(layout.steps))
        title = f"{name}, {its_steps} of {counted(len(layout.steps), 'step')}"
        axes_MC[0, column].set_title(title if layout.costs.forest is None else f"{title}\n{sharing_of(layout.steps)}")
        for step, axes in enumerate(axes_MC[:its_steps, column]):
            _draw_step(axes, layout, step, ranks, colours)
            axes.set_ylabel(f"step {step}\nrank")
        for axes in axes_MC[its_steps:, column]:
            axes.set_axis_off()
        lowest = axes_MC[its_steps - 1, column]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("cost, in rows of 1000 tokens")
        looks[f"rows ({name})"] = {"facecolor": colours[0]}
    left_out = "" if ranks == all_ranks else f" ({ranks} of {all_ranks} ranks)"
    figure.suptitle(f"micro-batches of each rank{left_out}")
    charts.add_legend(figure, {**looks, "pads": {"facecolor": charts.PADS}, "waiting": charts.WAITING})
    charts.save_chart(figure, path)


def _draw_step(axes: Any, layout: CutLayout, step: int, ranks: int, colours: tuple[str, str]) -> None:
    costs, unit = layout.costs, layout.costs.of(1000)
    real_DK, pads_DK = _loads(layout.rows_MDK[step], costs)
    heights_K = (real_DK + pads_DK).max(axis=0)
    starts_K = np.cumsum(heights_K) - heights_K
    assert costs.call.padded_to == "row", "a row is as wide as what it costs"
    for rank in range(ranks):
        for micro, (start, colour) in enumerate(zip(starts_K, cycle(colours), strict=False)):
            real, pads = real_DK[rank, micro], pads_DK[rank, micro]
            parts = (real / unit, pads / unit, (heights_K[micro] - real - pads) / unit)
            charts.draw_bar(axes, rank, start / unit, *parts, colour=colour)
    axes.set_ylim(ranks - 0.4, -0.6)


def _loads(rows_DK: Sequence[Sequence[Sequence[int]]], costs: CallCosts) -> tuple[Any, Any]:
    """Cost of each micro-batch of each rank without its pads, and that of its pads."""
    load_DK = np.array([micro_batch_loads(rows_K, costs) for rows_K in rows_DK], dtype=np.int64)
    n_pads_DK = [[sum(row >= costs.n_rows for row in rows) for rows in rows_K] for rows_K in rows_DK]
    pads_DK = costs.pad * np.array(n_pads_DK, dtype=np.int64)
    return load_DK - pads_DK, pads_DK
