"""What pads cost, what the plan does and what the workers say, logged under ``padding/`` each
step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, CRITIC
from verl_padding.plan import BatchPlan, Layout
from verl_padding.worker.losses import MICRO_BATCHES


def plan_metrics(plan: BatchPlan, tokens_R: Sequence[int], pad_length: int) -> dict[str, float]:
    """Metrics of a plan, of real rows with these tokens (prompt and response) and pads of
    ``pad_length``."""
    pad_tokens = plan.n_pads * pad_length
    metrics: dict[str, float] = {
        names.REAL_ROWS_TOTAL: len(tokens_R),
        names.PAD_ROWS_TOTAL: plan.n_pads,
        "padding/pad_tokens/total": pad_tokens,
        "padding/pad_tokens/share": pad_tokens / sum(tokens_R),
    }
    for call, layout in plan.layouts.items():
        figures = plan.figures[call]
        logged: dict[str, float | None] = {"packing_efficiency": figures.packing_efficiency}
        if plan.job.packer == "plan":
            logged["micro_batch_imbalance"] = figures.micro_imbalance
            if plan.job.sharing != "off":
                logged["computed_tokens/total"] = figures.computed_tokens
                logged["sharing_factor"] = figures.sharing_factor
        if CALL_BY_NAME[call].trains:
            logged["optimizer_steps/total"] = layout.n_mini_batches
            logged["mini_batch_real_rows/min"] = min(layout.real_rows_M)
            logged["mini_batch_real_rows/max"] = max(layout.real_rows_M)
            logged["pad_rows/total"] = layout.n_pads
            logged["imbalance"] = figures.imbalance
        else:  # of updates the workers report it, whoever cut the micro-batches
            logged["micro_batches"] = figures.micro_batches
        # None of what only verl's packer knows.
        metrics |= {
            f"padding/{call}/{name}": value for name, value in logged.items() if value is not None
        }
    return metrics


def layout_for_verl_metrics(plan: BatchPlan) -> Layout | None:
    """The layout by which verl's metrics count what ranks get: that of the actor's update, or of
    another call in a step without; None while a warm-up trains nothing and no pass runs."""
    return plan.layouts.get(ACTOR) or next(iter(plan.layouts.values()), None)


def performance_metrics(
    tokens: int, response_tokens: int, timing_raw: dict[str, float], n_gpus: int
) -> dict[str, float]:
    """verl's metrics of throughput and of time per token, by verl's timers of the global step."""
    # verl sums these over rows.
    lengths = {
        "prompt_length": torch.tensor([tokens - response_tokens]),
        "response_length": torch.tensor([response_tokens]),
    }
    batch = DataProto(batch=TensorDict(lengths, 1), meta_info={"global_token_num": [tokens]})
    per_token = compute_timing_metrics(batch, timing_raw)
    return {**per_token, **compute_throughout_metrics(batch, timing_raw, n_gpus)}


def rank_token_metrics(
    plan: BatchPlan, tokens_R: Sequence[int], pad_length: int
) -> dict[str, float]:
    """verl's metrics of what a rank gets."""
    if (layout := layout_for_verl_metrics(plan)) is None:
        return {}
    lengths = [tokens_R[row] if row < len(tokens_R) else pad_length for row in layout.order]
    partitions = np.arange(len(lengths)).reshape(layout.dp_size, -1).tolist()
    return dict(log_seqlen_unbalance(lengths, partitions, prefix="global_seqlen"))


def worker_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """The micro-batches that workers have reported about the updates of a step, which leave verl's
    ``metrics``."""
    return {
        f"padding/{update}/micro_batches": metrics.pop(name)
        for update in (ACTOR, CRITIC)
        if (name := f"{update}/{MICRO_BATCHES}") in metrics
    }
