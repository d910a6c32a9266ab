"""What pads cost and what the plan does, logged under ``padding/`` each step.

Names suit verl's aggregation over the local updates of a global step (``MetricsAggregator``): ``total`` is summed,
``max`` and ``min`` are extremes, ``timing_s/`` is summed, the rest is averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.plan import BatchPlan, Layout
from verl_padding.trainer.losses import MICRO_BATCHES, PACKING_EFFICIENCY
from verl_padding.verl_job.calls import CALLS

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
"""Seconds for planning the batch."""
LINEAGE_SECONDS = "timing_s/padding/lineage"
"""Seconds for finding out which rows extend each other, part of those for planning; with ``padding.sharing=chains``."""
UPSAMPLE_SECONDS = "timing_s/padding/upsample"
"""Seconds for making the pads and putting them into TransferQueue."""
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

MICRO_IMBALANCE = "padding/{call}/micro_batch_imbalance"
"""If the plan cuts micro-batches: cost of the slowest rank of each one, summed, over the mean rank's; 1 is perfect."""
CALL_MICRO_BATCHES = "padding/{call}/micro_batches"
"""Micro-batches of a rank, per optimizer step in an update, and in the whole pass otherwise."""
CALL_PACKING = "padding/{call}/packing_efficiency"
"""Tokens of real rows over micro-batches x token budget."""
COMPUTED_TOKENS = "padding/{call}/computed_tokens/total"
"""With ``padding.sharing=chains``: tokens of real rows that the call computes, all ranks together."""
SHARING_FACTOR = "padding/{call}/sharing_factor"
"""The same: tokens of real rows over computed tokens. 1 if nothing is shared."""
CALL_SECONDS = "padding/{call}/seconds"
"""Seconds of a worker call, as verl times it."""
CALL_MEMORY = "padding/{call}/max_memory_allocated_gb"
"""Peak memory of an update, as verl's workers report it."""
CALL_MEMORY_RESERVED = "padding/{call}/max_memory_reserved_gb"
"""The same plus what the allocator keeps in reserve: it is far higher if memory is fragmented."""


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
    if plan.packer == "plan":
        for call, figures in plan.figures.items():
            if plan.sharing == "chains":
                metrics[COMPUTED_TOKENS.format(call=call)] = figures.computed_tokens
                metrics[SHARING_FACTOR.format(call=call)] = figures.sharing_factor
            if figures.micro_imbalance is not None:
                metrics[MICRO_IMBALANCE.format(call=call)] = figures.micro_imbalance
            # For updates the workers report these, whoever cut the micro-batches.
            if call not in updates and figures.micro_batches is not None:
                metrics[CALL_MICRO_BATCHES.format(call=call)] = figures.micro_batches
            if call not in updates and figures.packing_efficiency is not None:
                metrics[CALL_PACKING.format(call=call)] = figures.packing_efficiency
    return metrics


def worker_metrics(
    metrics: dict[str, Any], seconds_before: Mapping[str, float], seconds_after: Mapping[str, float]
) -> dict[str, float]:
    """What the workers have reported about the calls of a step, renamed; their ``padding/`` metrics leave ``metrics``.

    Args:
        metrics: verl's metrics of the step, in which an update's are under ``actor/`` and ``critic/``.
        seconds_before: verl's timers when the step began; they run on over the local updates of a global step.
        seconds_after: verl's timers when it ended.
    """
    told: dict[str, float] = {}
    for update in (call.name for call in CALLS if call.trains):
        for theirs, ours in ((MICRO_BATCHES, CALL_MICRO_BATCHES), (PACKING_EFFICIENCY, CALL_PACKING)):
            if f"{update}/{theirs}" in metrics:
                told[ours.format(call=update)] = metrics.pop(f"{update}/{theirs}")
        for theirs, ours in (("allocated", CALL_MEMORY), ("reserved", CALL_MEMORY_RESERVED)):
            memory = metrics.get(f"{update}/perf/max_memory_{theirs}_gb")
            if memory is not None:
                told[ours.format(call=update)] = memory
    for call in CALLS:
        if call.timer in seconds_after:
            seconds = seconds_after[call.timer] - seconds_before.get(call.timer, 0.0)
            told[CALL_SECONDS.format(call=call.name)] = seconds
    return told


def real_rows_by_rank(layout: Layout, n_rows: int) -> list[list[int]]:
    """Real rows that each rank holds, over all mini-batches; verl's ``global_seqlen`` metrics are by rank."""
    return [[row for cells in layout.cells for row in cells[rank] if row < n_rows] for rank in range(layout.dp_size)]
