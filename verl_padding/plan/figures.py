"""Judges a layout by what its ranks cost."""

from __future__ import annotations

from verl_padding.plan.batch_plan import LayoutFigures
from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import micro_batches_of, mini_batch_costs


def score_layout(layout: Layout, costs: CallCosts) -> LayoutFigures:
    """The figures of a layout; lower bounds are those of its real rows, cut into its mini-batches."""
    is_cut = layout.micro_batch_rows is not None
    steps = mini_batch_costs(micro_batches_of(layout), costs, with_micro_bounds=is_cut)
    cost, n_ranks, budget = sum(step.cost for step in steps), layout.dp_size, costs.call.token_budget
    slowest = sum(step.mini_slowest for step in steps)
    micro_slowest = sum(step.micro_slowest for step in steps)
    n_micro = layout.n_micro_batches
    computed = sum(step.computed_tokens for step in steps)
    return LayoutFigures(
        imbalance=slowest * n_ranks / cost,
        over_lower_bound=slowest / sum(step.mini_bound for step in steps),
        micro_batches=n_micro,
        packing_efficiency=computed / (n_micro * n_ranks * budget) if n_micro and budget else None,
        computed_tokens=computed,
        sharing_factor=int(costs.tokens_R.sum()) / computed,
        micro_imbalance=micro_slowest * n_ranks / cost if is_cut else None,
        micro_over_lower_bound=micro_slowest / sum(step.micro_bound for step in steps) if is_cut else None,
        optimizer_steps=layout.n_mini_batches,
        pads=layout.n_pads,
        rows_per_cell=layout.rows_per_cell,
        real_rows_min=min(layout.real_rows_M),
        real_rows_max=max(layout.real_rows_M),
    )
