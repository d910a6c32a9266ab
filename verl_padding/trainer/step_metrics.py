"""What pads cost and what the plan does, logged under ``padding/`` each step.

Names suit verl's aggregation over the local updates of a global step (``MetricsAggregator``): ``total`` is summed,
``max`` and ``min`` are extremes, ``timing_s/`` is summed, the rest is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_padding.plan import BatchPlan, Layout

REAL_ROWS_TOTAL = "padding/real_rows/total"
"""Real rows of the batch."""
PAD_ROWS_TOTAL = "padding/pad_rows/total"
"""Pads made for the batch; a worker call uses as many of them as its layout needs."""
PAD_ROWS_SHARE = "padding/pad_rows/share"
"""Pads over real rows."""
PAD_TOKENS_TOTAL = "padding/pad_tokens/total"
"""Tokens of all pads."""
PAD_TOKENS_SHARE = "padding/pad_tokens/share"
"""Tokens of all pads over tokens of all real rows."""
PLAN_SECONDS = "timing_s/padding/plan"
"""Planning the batch."""
UPSAMPLE_SECONDS = "timing_s/padding/upsample"
"""Making the pads and putting them into TransferQueue."""
OPTIMIZER_STEPS = "padding/{update}/optimizer_steps/total"
"""Optimizer steps of an epoch over the batch."""
REAL_ROWS_MIN = "padding/{update}/mini_batch_real_rows/min"
"""Fewest real rows in a mini-batch: never 0."""
REAL_ROWS_MAX = "padding/{update}/mini_batch_real_rows/max"
"""Most real rows in a mini-batch."""
UPDATE_PADS = "padding/{update}/pad_rows/total"
"""Pads in the update's mini-batches."""
IMBALANCE = "padding/{update}/imbalance"
"""Cost of the slowest rank over the mean rank, summed over the mini-batches: 1 is perfect."""


def plan_metrics(
    plan: BatchPlan, tokens_R: Sequence[int], *, updates: Sequence[str], pad_length: int
) -> dict[str, float]:
    """Metrics of a plan.

    Args:
        tokens_R: tokens (prompt and response) of each real row.
        updates: names of the plan's updates; its other layouts are inference passes.
        pad_length: tokens of a pad.
    """
    n_rows = len(tokens_R)
    pad_tokens = plan.n_pads * pad_length
    metrics: dict[str, float] = {
        REAL_ROWS_TOTAL: n_rows,
        PAD_ROWS_TOTAL: plan.n_pads,
        PAD_ROWS_SHARE: plan.n_pads / n_rows,
        PAD_TOKENS_TOTAL: pad_tokens,
        PAD_TOKENS_SHARE: pad_tokens / sum(tokens_R),
    }
    for update in updates:
        layout = plan.layouts[update]
        metrics |= {
            OPTIMIZER_STEPS.format(update=update): layout.n_mini_batches,
            REAL_ROWS_MIN.format(update=update): min(layout.real_rows_M),
            REAL_ROWS_MAX.format(update=update): max(layout.real_rows_M),
            UPDATE_PADS.format(update=update): layout.n_pads,
            IMBALANCE.format(update=update): plan.figures[update].imbalance,
        }
    return metrics


def real_rows_by_rank(layout: Layout, n_rows: int) -> list[list[int]]:
    """Real rows that each rank holds, over all mini-batches: verl's ``global_seqlen`` metrics are told by rank."""
    return [[row for cells in layout.cells for row in cells[rank] if row < n_rows] for rank in range(layout.dp_size)]
