"""What pads cost, what the plan does and what the workers say, logged under ``padding/`` each
step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, CALLS
from verl_padding.plan import BatchPlan, Layout
from verl_padding.worker.losses import MICRO_BATCHES, PACKING_EFFICIENCY

REPORTED = (
    MICRO_BATCHES,
    PACKING_EFFICIENCY,
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
)
"""What the workers report of an update."""


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
        figures, trains = plan.figures[call], CALL_BY_NAME[call].trains
        if trains:
            metrics |= {
                names.OPTIMIZER_STEPS.format(update=call): layout.n_mini_batches,
                f"padding/{call}/mini_batch_real_rows/min": min(layout.real_rows_M),
                f"padding/{call}/mini_batch_real_rows/max": max(layout.real_rows_M),
                f"padding/{call}/pad_rows/total": layout.n_pads,
                f"padding/{call}/imbalance": figures.imbalance,
            }
        if plan.packer == "plan":
            call_metrics = {"micro_batch_imbalance": figures.micro_imbalance}
            if plan.sharing != "off":
                call_metrics["computed_tokens/total"] = figures.computed_tokens
                call_metrics["sharing_factor"] = figures.sharing_factor
            if not trains:  # of updates the workers report these, whoever cut the micro-batches
                call_metrics["micro_batches"] = figures.micro_batches
                call_metrics["packing_efficiency"] = figures.packing_efficiency
            metrics |= {
                f"padding/{call}/{name}": value
                for name, value in call_metrics.items()
                if value is not None
            }
    return metrics


@dataclass
class WorkDone:
    """What worker calls have done for real rows, over all times that a step has made them."""

    calls: set[str] = field(default_factory=set)
    computed: int = 0
    """Tokens that reached the models, as workers have counted them."""
    shared: int = 0
    """Those that did not, as other rows have them."""
    zero_advantage: int = 0
    """Those that did not, as their rows were left out."""


def saved_metrics(work: WorkDone, pass_tokens: int) -> dict[str, float]:
    """Tokens of real rows that the calls of a step have computed, and those that they need not,
    ``pass_tokens`` of them in a pass for old log-probs."""
    # An update of 100 tokens over 2 epochs, of which 30 are shared and 20 of rows left out: 100 are
    # computed, 60 and 40 saved.
    saved = (work.shared, work.zero_advantage, pass_tokens)
    return {
        names.ALL_COMPUTED_TOKENS: work.computed,
        **dict(zip(names.SAVED_TOKENS, saved, strict=True)),
        names.SAVED_PASSES: int(pass_tokens > 0),
    }


def layout_of_ranks(plan: BatchPlan) -> Layout | None:
    """The layout by which verl's metrics count what ranks get: that of the actor's update, or of
    another call in a step without; None while a warm-up trains nothing and no pass runs."""
    return plan.layouts.get(ACTOR) or next(iter(plan.layouts.values()), None)


def performance_metrics(
    rows_of: Sequence[TrainedRows],
    pad_tags: Sequence[Mapping[str, Any]],
    timing_raw: dict[str, float],
    n_gpus: int,
) -> dict[str, float]:
    """verl's metrics of throughput and of time per token: of the rows of each local update, and of
    pads with these tags.

    Args:
        timing_raw: verl's timers of the global step.
    """
    tokens_R = [n for rows in rows_of for n in rows.tokens_R.tolist()]
    response_R = [n for rows in rows_of for n in rows.response_R.tolist()]
    tokens = torch.tensor([*tokens_R, *(tag["seq_len"] for tag in pad_tags)])
    response = torch.tensor([*response_R, *(tag["response_len"] for tag in pad_tags)])
    lengths = {"prompt_length": tokens - response, "response_length": response}
    batch = DataProto(
        batch=TensorDict(lengths, len(tokens)), meta_info={"global_token_num": tokens.tolist()}
    )
    per_token = compute_timing_metrics(batch, timing_raw)
    return {**per_token, **compute_throughout_metrics(batch, timing_raw, n_gpus)}


def rank_token_metrics(
    plan: BatchPlan, tokens_R: Sequence[int], pad_length: int
) -> dict[str, float]:
    """verl's metrics of what a rank gets."""
    if (layout := layout_of_ranks(plan)) is None:
        return {}
    lengths = [tokens_R[row] if row < len(tokens_R) else pad_length for row in layout.order]
    partitions = np.arange(len(lengths)).reshape(layout.dp_size, -1).tolist()
    return dict(log_seqlen_unbalance(lengths, partitions, prefix="global_seqlen"))


def worker_metrics(
    metrics: dict[str, Any], seconds_before: Mapping[str, float], seconds_after: Mapping[str, float]
) -> dict[str, float]:
    """What the workers have reported about the calls of a step, renamed; their ``padding/`` metrics
    leave ``metrics``.

    Args:
        metrics: verl's metrics of the step, in which an update's are under ``actor/`` and
            ``critic/``.
        seconds_before, seconds_after: verl's timers, which run on over the local updates of a
            global step.
    """
    reported: dict[str, float] = {}
    for call in CALLS:
        for theirs in REPORTED:
            if call.trains and (name := f"{call.name}/{theirs}") in metrics:
                ours = theirs.rpartition("/")[2]
                reported[f"padding/{call.name}/{ours}"] = metrics[name]
                if theirs in (MICRO_BATCHES, PACKING_EFFICIENCY):
                    del metrics[name]
        if call.timer in seconds_after:
            seconds = seconds_after[call.timer] - seconds_before.get(call.timer, 0.0)
            reported[names.CALL_SECONDS.format(call=call.name)] = seconds
    return reported
