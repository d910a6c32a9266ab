"""What the steps of a plan cost, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from verl_padding.plan import Packer
from verl_padding.plan.mini_batch_costs import MiniBatchCost

MOST_LINES = 20
"""Most lines that a table shows one by one: of more, only the first ones and the last."""

STEPS, COMPUTED, MICRO_BATCHES = "steps", "computed\ntokens", "micro-\nbatches"
"""Columns that not every table has."""


def step_table(steps_of: Mapping[str, Sequence[MiniBatchCost]], *, of: str, title: str, packer: Packer) -> Table:
    """A line for the steps of each name, the middle ones folded if there are many, and a line for all steps.

    Args:
        of: what a name is: a ``step``, or a ``file`` with some steps.
        packer: with ``verl``, ranks are judged by whole steps, for the workers cut the micro-batches.
    """
    every = [step for steps in steps_of.values() for step in steps]
    left_out = {
        STEPS: of == "step",
        COMPUTED: all(step.computed_tokens == step.real_tokens for step in every),
        MICRO_BATCHES: packer == "verl",
    }

    def cells(steps: Sequence[MiniBatchCost]) -> dict[str, str]:
        return {column: text for column, text in _cells(steps, packer).items() if not left_out.get(column)}

    table = Table(title=escape(title), title_justify="left", show_footer=True)
    for column, text in {of: "all", **cells(every)}.items():
        # Not wrapped: rich would cut digits off in narrow columns.
        table.add_column(column, footer=text, justify="right", no_wrap=True)
    names = list(steps_of)
    hidden = dict.fromkeys(names[MOST_LINES - 2 : -1]) if len(names) > MOST_LINES else {}
    for name in names:
        if name not in hidden:
            table.add_row(name, *cells(steps_of[name]).values())
        elif name == names[MOST_LINES - 2]:
            folded = [step for name in hidden for step in steps_of[name]]
            table.add_row(f"{len(hidden)} more", *cells(folded).values())
    return table


def _cells(steps: Sequence[MiniBatchCost], packer: Packer) -> dict[str, str]:
    """All cells of a line, by the headings of their columns."""
    by_micro = packer == "plan"
    slowest = sum(step.micro_slowest if by_micro else step.mini_slowest for step in steps)
    bound = sum(step.micro_bound if by_micro else step.mini_bound for step in steps)
    return {
        STEPS: f"{len(steps):,}",
        "rows": f"{sum(step.real_rows for step in steps):,}",
        "pads": f"{sum(step.pads for step in steps):,}",
        "tokens\nof rows": f"{sum(step.real_tokens for step in steps):,}",
        COMPUTED: f"{sum(step.computed_tokens for step in steps):,}",
        MICRO_BATCHES: f"{sum(step.micro_batches for step in steps):,}",
        "slowest /\nmean rank": f"{slowest * steps[0].ranks / sum(step.cost for step in steps):.3f}",
        "over lower\nbound": f"{slowest / max(bound, 1):.3f}",
    }
