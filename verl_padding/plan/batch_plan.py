"""The plan of a batch: a layout for every worker call, and the figures that judge it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from verl_padding.plan.errors import PlanError
from verl_padding.plan.job import Packer
from verl_padding.plan.layout import Layout


@dataclass(frozen=True, kw_only=True)
class LayoutFigures:
    """What a layout costs, by the job's cost model; pads cost too."""

    imbalance: float
    """Cost of the slowest rank over that of the mean rank, each summed over the mini-batches: 1 is perfect."""

    over_lower_bound: float
    """Cost of the slowest rank over the least it could be, each summed over the mini-batches.

    No rank can have less than the dearest row, and not all ranks can have less than the mean of the real rows.
    """

    micro_batches: int | None
    """Micro-batches of a rank, over the mini-batches; None where verl's packer cuts them, and so for the next three."""

    packing_efficiency: float | None
    """Tokens over what the micro-batches of all ranks could hold; None also without a token budget."""

    micro_imbalance: float | None
    """As ``imbalance``, for ranks that meet at every micro-batch: the slowest rank of each, summed, over the mean."""

    micro_over_lower_bound: float | None
    """The slowest rank of each micro-batch, summed, over the least it could be (``micro_batch_bound``)."""

    optimizer_steps: int
    """Mini-batches of an epoch; 1 for an inference pass."""

    pads: int
    """Pads in the layout."""

    rows_per_cell: int
    """Rows of every cell, pads among them."""

    real_rows_min: int
    """Fewest real rows in a mini-batch."""

    real_rows_max: int
    """Most real rows in a mini-batch."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One layout of the same real rows, and of as many of the pads as it needs, for each worker call."""

    n_rows: int
    """Real rows."""

    packer: Packer = "verl"
    """Who cuts micro-batches by tokens: verl's packer in the workers, or this plan."""

    layouts: Mapping[str, Layout]
    """Layout of each update and inference pass of the job, by its name."""

    figures: Mapping[str, LayoutFigures] = field(default_factory=dict)
    """Figures of each layout, by its name."""

    warnings: tuple[str, ...] = ()
    """What a user should know, such as fewer optimizer steps than configured."""

    @cached_property
    def n_pads(self) -> int:
        """Pads to make: the most that a layout uses."""
        return max((layout.n_pads for layout in self.layouts.values()), default=0)

    def to_json(self) -> str:
        """The plan as JSON, to be read with :meth:`from_json`."""
        return json.dumps(
            {
                "n_rows": self.n_rows,
                "packer": self.packer,
                "n_pads": self.n_pads,
                "layouts": {
                    name: {"cells": layout.cells, "micro_batch_rows": layout.micro_batch_rows}
                    for name, layout in self.layouts.items()
                },
                "figures": {name: asdict(figures) for name, figures in self.figures.items()},
                "warnings": self.warnings,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> BatchPlan:
        """Reads what :meth:`to_json` wrote.

        Raises:
            PlanError: not the JSON of a plan.
        """
        try:
            data = json.loads(text)
            n_rows = data["n_rows"]
            layouts = {
                name: Layout(
                    n_rows=n_rows,
                    cells=_frozen(layout["cells"]),
                    micro_batch_rows=_frozen(layout["micro_batch_rows"]),
                )
                for name, layout in data["layouts"].items()
            }
            figures = {name: LayoutFigures(**values) for name, values in data["figures"].items()}
            return cls(
                n_rows=n_rows,
                packer=data["packer"],
                layouts=layouts,
                figures=figures,
                warnings=tuple(data["warnings"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"not the JSON of a plan: {type(error).__name__}: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
