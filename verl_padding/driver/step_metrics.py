"""What pads cost and what the plan does, logged under ``padding/`` each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics

from verl_padding.job.calls import CALLS
from verl_padding.job.metric_names import (
    CALL_MEMORY,
    CALL_MEMORY_RESERVED,
    CALL_MICRO_BATCHES,
    CALL_PACKING,
    CALL_SECONDS,
    COMPUTED_TOKENS,
    IMBALANCE,
    MICRO_IMBALANCE,
    OPTIMIZER_STEPS,
    PAD_ROWS_SHARE,
    PAD_ROWS_TOTAL,
    PAD_TOKENS_SHARE,
    PAD_TOKENS_TOTAL,
    REAL_ROWS_MAX,
    REAL_ROWS_MIN,
    REAL_ROWS_TOTAL,
    SHARING_FACTOR,
    UPDATE_PADS,
)
from verl_padding.plan import BatchPlan
from verl_padding.worker.losses import MICRO_BATCHES, PACKING_EFFICIENCY


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


def performance_metrics(
    metrics: Mapping[str, float],
    n_rows: int,
    pad_tags: Sequence[Mapping[str, int]],
    timing_raw: dict[str, float],
    n_gpus: int,
) -> dict[str, float]:
    """verl's metrics of tokens and seconds, for all rows that the workers got: they alone count pads in verl, too.

    Args:
        metrics: verl's, of the ``n_rows`` real rows.
        pad_tags: of each pad.
        timing_raw: verl's timers.
    """
    response = metrics["response_length/mean"] * n_rows
    prompt = metrics["perf/total_num_tokens"] - response
    lengths = {
        "prompt_length": torch.tensor([prompt, *[tag["prompt_len"] for tag in pad_tags]]),
        "response_length": torch.tensor([response, *[tag["response_len"] for tag in pad_tags]]),
    }
    tokens = [metrics["perf/total_num_tokens"], *[tag["seq_len"] for tag in pad_tags]]
    batch = DataProto.from_dict(lengths, meta_info={"global_token_num": tokens})
    told: dict[str, float] = compute_timing_metrics(batch, timing_raw)
    return told | compute_throughout_metrics(batch, timing_raw, n_gpus)
