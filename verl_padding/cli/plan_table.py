"""What the steps of a layout cost, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from verl_padding.plan.mini_batch_costs import MiniBatchCost

MOST_LINES = 20
"""Most steps that a table shows one by one: of more, only the first ones and the last."""


def step_table(steps: Sequence[MiniBatchCost], *, title: str) -> Table:
    """One line per step, the middle ones folded if there are many, and a line for all steps."""
    table = Table(title=title, title_justify="left", show_footer=True)
    shares = any(step.computed_tokens < step.real_tokens for step in steps)
    headings = ["step", "rows", "pads", "tokens", "micro-\nbatches", "slowest /\nmean rank", "over lower\nbound"]
    if shares:
        headings.insert(4, "computed\ntokens")
    for heading, text in zip(headings, ["all", *_line(steps, shares)], strict=True):
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(heading, footer=text, justify="right", no_wrap=True)
    shown = list(range(len(steps)))
    if len(steps) > MOST_LINES:
        shown = [*shown[: MOST_LINES - 2], -1, shown[-1]]
    for step in shown:
        if step < 0:
            hidden = steps[MOST_LINES - 2 : -1]
            table.add_row(f"{len(hidden)} more", *_line(hidden, shares))
        else:
            table.add_row(str(step), *_line([steps[step]], shares))
    return table


def _line(steps: Sequence[MiniBatchCost], shares: bool) -> list[str]:
    slowest = sum(step.micro_slowest for step in steps)
    return [
        f"{sum(step.real_rows for step in steps):,}",
        f"{sum(step.pads for step in steps):,}",
        f"{sum(step.tokens for step in steps):,}",
        *([f"{sum(step.tokens - step.real_tokens + step.computed_tokens for step in steps):,}"] if shares else []),
        f"{sum(step.micro_batches for step in steps):,}",
        f"{slowest * steps[0].ranks / sum(step.cost for step in steps):.3f}",
        f"{slowest / max(sum(step.micro_bound for step in steps), 1):.3f}",
    ]


def comparison_table(stock: Sequence[MiniBatchCost], planned: Sequence[MiniBatchCost]) -> Table:
    """Stock verl and the plan side by side. "Perfect" is what the real rows would take on ranks that never wait."""
    table = Table(title="the whole batch, stock verl and the plan", title_justify="left")
    for heading in ("", "verl", "plan"):
        table.add_column(heading, justify="right" if heading else "left")
    columns = [_totals(stock), _totals(planned)]
    for name in columns[0]:
        table.add_row(name, *[column[name] for column in columns])
    return table


def _totals(steps: Sequence[MiniBatchCost]) -> dict[str, str]:
    perfect = sum(step.real_cost for step in steps) / steps[0].ranks
    mean = sum(step.cost for step in steps) / steps[0].ranks
    mini, micro = sum(step.mini_slowest for step in steps), sum(step.micro_slowest for step in steps)
    real = [step.real_rows for step in steps]
    return {
        "optimizer steps": f"{len(steps):,}",
        "real rows of a step": f"{min(real):,} to {max(real):,}, mean {fmean(real):,.0f}",
        "rows": f"{sum(real):,}",
        "pads": f"{sum(step.pads for step in steps):,}",
        "tokens": f"{sum(step.tokens for step in steps):,}",
        "computed tokens": f"{sum(step.tokens - step.real_tokens + step.computed_tokens for step in steps):,}",
        "micro-batches": f"{sum(step.micro_batches for step in steps):,}",
        "slowest / mean rank, per step": f"{mini / mean:.3f}",
        "slowest / mean rank, per micro-batch": f"{micro / mean:.3f}",
        "time over perfect, per step": f"{mini / perfect:.3f}",
        "time over perfect, per micro-batch": f"{micro / perfect:.3f}",
    }
