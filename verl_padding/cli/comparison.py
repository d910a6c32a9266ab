"""Layouts of the same batch side by side: stock verl's and the plan's, with and without sharing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from verl_padding.plan.mini_batch_costs import MiniBatchCost


@dataclass(frozen=True, kw_only=True)
class LayoutTotals:
    """A layout in numbers. "Perfect" is the time of ranks that never wait and compute each real row, and no pad."""

    optimizer_steps: int
    """Mini-batches."""

    real_rows_min: int
    """Fewest real rows of a mini-batch."""

    real_rows_max: int
    """Most real rows of a mini-batch."""

    rows: int
    """Real rows."""

    pads: int
    """Pads."""

    tokens: int
    """Tokens of the real rows."""

    pad_tokens: int
    """Tokens of the pads."""

    computed_tokens: int
    """Tokens of the real rows that are computed: fewer than ``tokens`` where prefixes are shared."""

    micro_batches: int
    """Micro-batches of a rank."""

    imbalance: float
    """Slowest rank over mean rank, for ranks that wait for each other once per optimizer step."""

    micro_imbalance: float
    """The same for ranks that wait at each micro-batch, as FSDP's do."""

    over_perfect: float
    """Time over perfect, for ranks that wait once per optimizer step; below 1 where prefixes are shared."""

    micro_over_perfect: float
    """The same for ranks that wait at each micro-batch."""

    @classmethod
    def of(cls, steps: Sequence[MiniBatchCost], row_cost: int) -> LayoutTotals:
        """Sums up the steps of a layout.

        Args:
            row_cost: cost of all real rows, each computed.
        """
        mean = sum(step.cost for step in steps) / steps[0].ranks
        perfect = row_cost / steps[0].ranks
        mini, micro = sum(step.mini_slowest for step in steps), sum(step.micro_slowest for step in steps)
        return cls(
            optimizer_steps=len(steps),
            real_rows_min=min(step.real_rows for step in steps),
            real_rows_max=max(step.real_rows for step in steps),
            rows=sum(step.real_rows for step in steps),
            pads=sum(step.pads for step in steps),
            tokens=sum(step.real_tokens for step in steps),
            pad_tokens=sum(step.tokens - step.real_tokens for step in steps),
            computed_tokens=sum(step.computed_tokens for step in steps),
            micro_batches=sum(step.micro_batches for step in steps),
            imbalance=mini / mean,
            micro_imbalance=micro / mean,
            over_perfect=mini / perfect,
            micro_over_perfect=micro / perfect,
        )


def comparison_table(totals_of: Mapping[str, LayoutTotals], *, title: str) -> Table:
    """The layouts side by side, a column each."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in totals_of:
        table.add_column(name, justify="right", overflow="fold")
    lines = [_lines(totals) for totals in totals_of.values()]
    for heading in lines[0]:
        table.add_row(heading, *[column[heading] for column in lines])
    return table


def _lines(totals: LayoutTotals) -> dict[str, str]:
    return {
        "optimizer steps": f"{totals.optimizer_steps:,}",
        "rows of a step": f"{totals.real_rows_min:,} to {totals.real_rows_max:,}",
        "rows": f"{totals.rows:,}",
        "pads": f"{totals.pads:,}",
        "tokens of rows": f"{totals.tokens:,}",
        "tokens of pads": f"{totals.pad_tokens:,}",
        "computed tokens of rows": f"{totals.computed_tokens:,}",
        "micro-batches": f"{totals.micro_batches:,}",
        "slowest / mean rank, per step": f"{totals.imbalance:.3f}",
        "slowest / mean rank, per micro-batch": f"{totals.micro_imbalance:.3f}",
        "time over perfect, per step": f"{totals.over_perfect:.3f}",
        "time over perfect, per micro-batch": f"{totals.micro_over_perfect:.3f}",
    }
