"""A picture of a plan: each step's ranks as bars, cut into micro-batches, with the time that ranks wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.cli.planned_file import LaidOut
from verl_padding.plan.counted import counted
from verl_padding.plan.mini_batch_costs import micro_batch_loads
from verl_padding.runs.charts import PADS, WAITING, add_legend, new_figure, save_chart

MOST_STEPS, MOST_RANKS, MOST_BARS = 6, 64, 128
"""More are not drawn: with many ranks, fewer steps, so that the picture fits a screen or two."""

Colours = tuple[str, str]
"""Of rows, in every other micro-batch."""


def draw_layouts(layouts: Mapping[str, tuple[LaidOut, Colours]], path: Path) -> None:
    """Draws the first steps of layouts of one batch, side by side, micro-batch after micro-batch.

    A micro-batch begins when all ranks are ready. All steps have one scale, so that they can be compared.

    Args:
        layouts: each with its colours, by its name.
        path: picture, of a kind that matplotlib writes.
    """
    first, _ = next(iter(layouts.values()))
    all_ranks, all_steps = len(first.rows_MDK[0]), max(laid.n_steps for laid, _ in layouts.values())
    ranks = min(all_ranks, MOST_RANKS)
    steps = min(all_steps, MOST_STEPS, MOST_BARS // ranks)
    figure, axes_MC = new_figure(
        nrows=steps,
        ncols=len(layouts),
        sharex=True,
        squeeze=False,
        figsize=(10 * len(layouts), 1 + steps * (0.8 + 0.16 * ranks)),
        layout="constrained",
    )
    looks: dict[str, dict[str, Any]] = {}
    for column, (name, (laid, colours)) in enumerate(layouts.items()):
        its_steps = min(steps, laid.n_steps)
        axes_MC[0, column].set_title(_title(name, laid, its_steps))
        for step, axes in enumerate(axes_MC[:its_steps, column]):
            _draw_step(axes, laid, step, ranks, colours)
            axes.set_ylabel(f"step {step}\nrank")
        for axes in axes_MC[its_steps:, column]:
            axes.set_axis_off()
        lowest = axes_MC[its_steps - 1, column]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("cost, in rows of 1000 tokens")
        looks[f"rows ({name})" if len(layouts) > 1 else "rows"] = {"facecolor": colours[0]}
    left_out = "" if ranks == all_ranks else f" ({ranks} of {all_ranks} ranks)"
    figure.suptitle(f"micro-batches of each rank{left_out}")
    add_legend(figure, {**looks, "pads": {"facecolor": PADS}, "waiting": WAITING})
    save_chart(figure, path)


def _title(name: str, laid: LaidOut, drawn_steps: int) -> str:
    title = f"{name}, {drawn_steps} of {counted(laid.n_steps, 'step')}"
    if laid.costs.chain_R is None:
        return title
    tokens, computed = (sum(getattr(step, kind) for step in laid.steps) for kind in ("real_tokens", "computed_tokens"))
    return f"{title}\n{computed:,} of {tokens:,} tokens computed: sharing factor {tokens / computed:.2f}"


def _draw_step(axes: Any, laid: LaidOut, step: int, ranks: int, colours: Colours) -> None:
    costs, unit = laid.costs, laid.costs.of(1000)
    real_DK, pads_DK = _loads(laid.rows_MDK[step], laid)
    heights_K = (real_DK + pads_DK).max(axis=0)
    starts_K = np.cumsum(heights_K) - heights_K
    assert costs.call.padded_to == "row", "a row is as wide as what it costs"
    for rank in range(ranks):
        for micro, (start, colour) in enumerate(zip(starts_K, cycle(colours), strict=False)):
            real, pads = real_DK[rank, micro], pads_DK[rank, micro]
            waits = heights_K[micro] - real - pads
            axes.barh(rank, real / unit, left=start / unit, color=colour, edgecolor="white", linewidth=0.6)
            # A pad may be narrower than a line: its edge makes it visible.
            if pads:
                axes.barh(rank, pads / unit, left=(start + real) / unit, color=PADS, edgecolor=PADS, linewidth=1.2)
            if waits:
                axes.barh(rank, waits / unit, left=(start + real + pads) / unit, **WAITING)
    axes.set_ylim(ranks - 0.4, -0.6)


def _loads(rows_DK: Sequence[Sequence[Sequence[int]]], laid: LaidOut) -> tuple[Any, Any]:
    """Cost of each micro-batch of each rank without its pads, and that of its pads."""
    costs = laid.costs
    load_DK = np.array([micro_batch_loads(rows_K, costs) for rows_K in rows_DK], dtype=np.int64)
    n_pads_DK = [[sum(row >= costs.n_rows for row in rows) for rows in rows_K] for rows_K in rows_DK]
    pads_DK = costs.pad * np.array(n_pads_DK, dtype=np.int64)
    return load_DK - pads_DK, pads_DK
