"""What the steps of a plan cost, and how that compares with stock verl, as tables."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from verl_padding.plan.mini_batch_costs import MiniBatchCost

MOST_LINES = 20
"""Most lines that a table shows one by one: of more, only the first ones and the last."""


def totals_of(steps: Sequence[MiniBatchCost], row_cost: int) -> dict[str, float]:
    """A layout in numbers, which docs/rows_file.md explains.

    "Perfect" is the time of ranks that never wait and compute each real row, and no pad.

    Args:
        steps: of the layout, of one batch or of several.
        row_cost: cost of all real rows, each computed.
    """
    mean = sum(step.cost for step in steps) / steps[0].ranks
    perfect = row_cost / steps[0].ranks
    mini, micro = sum(step.mini_slowest for step in steps), sum(step.micro_slowest for step in steps)
    return {
        "optimizer_steps": len(steps),
        "real_rows_min": min(step.real_rows for step in steps),
        "real_rows_max": max(step.real_rows for step in steps),
        "rows": sum(step.real_rows for step in steps),
        "pads": sum(step.pads for step in steps),
        "tokens": sum(step.real_tokens for step in steps),
        "pad_tokens": sum(step.tokens - step.real_tokens for step in steps),
        "computed_tokens": sum(step.computed_tokens for step in steps),
        "micro_batches": sum(step.micro_batches for step in steps),
        "imbalance": mini / mean,
        "micro_imbalance": micro / mean,
        "over_perfect": mini / perfect,
        "micro_over_perfect": micro / perfect,
    }


def comparison_table(totals: Mapping[str, Mapping[str, float]], *, title: str) -> Table:
    """Layouts side by side: a column each, and a line for each figure."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in totals:
        table.add_column(name, justify="right", overflow="fold")
    for figure in next(iter(totals.values())):
        numbers = [of_layout[figure] for of_layout in totals.values()]
        cells = [f"{number:,}" if isinstance(number, int) else f"{number:.3f}" for number in numbers]
        table.add_row(figure.replace("_", " "), *cells)
    return table


def step_table(steps_of: Mapping[str, Sequence[MiniBatchCost]], *, of: str, title: str, by_micro: bool) -> Table:
    """A line for the steps of each name, the middle ones folded if there are many, and a line for all steps.

    Args:
        of: what a name is: a ``step``, or a ``file`` with some steps.
        by_micro: ranks wait for each other at each micro-batch; False if the workers cut them, then once per step.
    """
    every = [step for steps in steps_of.values() for step in steps]
    is_shown = {
        "steps": of == "file",
        "computed\ntokens": any(step.computed_tokens < step.real_tokens for step in every),
        "micro-\nbatches": by_micro,
    }
    columns = [column for column in _cells(every, by_micro) if is_shown.get(column, True)]
    lines = dict(steps_of)
    if len(lines) > MOST_LINES:
        *first, last = lines
        hidden = first[MOST_LINES - 2 :]
        folded = {f"{len(hidden)} more": [step for name in hidden for step in steps_of[name]]}
        lines = {name: steps_of[name] for name in first[: MOST_LINES - 2]} | folded | {last: steps_of[last]}
    table = Table(title=escape(title), title_justify="left", show_footer=True)
    table.add_column(of, footer="all", justify="right", no_wrap=True)
    for column in columns:
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=_cells(every, by_micro)[column], justify="right", no_wrap=True)
    for name, steps in lines.items():
        cells = _cells(steps, by_micro)
        table.add_row(name, *[cells[column] for column in columns])
    return table


def _cells(steps: Sequence[MiniBatchCost], by_micro: bool) -> dict[str, str]:
    """All cells of a line, by the headings of their columns."""
    slowest = sum(step.micro_slowest if by_micro else step.mini_slowest for step in steps)
    bound = sum(step.micro_bound if by_micro else step.mini_bound for step in steps)
    return {
        "steps": f"{len(steps):,}",
        "rows": f"{sum(step.real_rows for step in steps):,}",
        "pads": f"{sum(step.pads for step in steps):,}",
        "tokens\nof rows": f"{sum(step.real_tokens for step in steps):,}",
        "computed\ntokens": f"{sum(step.computed_tokens for step in steps):,}",
        "micro-\nbatches": f"{sum(step.micro_batches for step in steps):,}",
        "slowest /\nmean rank": f"{slowest * steps[0].ranks / sum(step.cost for step in steps):.3f}",
        "over lower\nbound": f"{slowest / max(bound, 1):.3f}",
    }


def sharing_of(steps: Sequence[MiniBatchCost]) -> str:
    """How many tokens are computed where rows share prefixes."""
    tokens, computed = sum(step.real_tokens for step in steps), sum(step.computed_tokens for step in steps)
    return f"{computed:,} of {tokens:,} tokens computed: sharing factor {tokens / computed:.2f}"
