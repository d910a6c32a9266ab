"""What pads cost, what the plan does and what sessions are, logged under ``padding/`` each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, CALLS
from verl_padding.pads.queue import KVBatchMeta, read_fields
from verl_padding.plan import BatchPlan
from verl_padding.plan.row_keys import rows_of_sessions
from verl_padding.worker.losses import MICRO_BATCHES, PACKING_EFFICIENCY

SCORES, TURNS = "rm_scores", "num_turns"
"""Fields of verl's rows."""


def plan_metrics(plan: BatchPlan, tokens_R: Sequence[int], pad_length: int) -> dict[str, float]:
    """Metrics of a plan, of real rows with these tokens (prompt and response) and pads of ``pad_length``."""
    n_rows, pad_tokens = len(tokens_R), plan.n_pads * pad_length
    updates = [call for call in plan.layouts if CALL_BY_NAME[call].trains]
    metrics: dict[str, float] = {
        names.REAL_ROWS_TOTAL: n_rows,
        names.PAD_ROWS_TOTAL: plan.n_pads,
        names.PAD_ROWS_SHARE: plan.n_pads / n_rows,
        names.PAD_TOKENS_TOTAL: pad_tokens,
        names.PAD_TOKENS_SHARE: pad_tokens / sum(tokens_R),
    }
    for update in updates:
        layout = plan.layouts[update]
        metrics |= {
            names.OPTIMIZER_STEPS.format(update=update): layout.n_mini_batches,
            names.REAL_ROWS_MIN.format(update=update): min(layout.real_rows_M),
            names.REAL_ROWS_MAX.format(update=update): max(layout.real_rows_M),
            names.UPDATE_PADS.format(update=update): layout.n_pads,
            names.IMBALANCE.format(update=update): plan.figures[update].imbalance,
        }
    if plan.packer == "plan":
        for call, figures in plan.figures.items():
            of_call: dict[str, float | None] = {names.MICRO_IMBALANCE: figures.micro_imbalance}
            if plan.sharing == "chains":
                of_call[names.COMPUTED_TOKENS] = figures.computed_tokens
                of_call[names.SHARING_FACTOR] = figures.sharing_factor
            if call not in updates:  # of updates the workers report these, whoever cut the micro-batches
                of_call[names.CALL_MICRO_BATCHES] = figures.micro_batches
                of_call[names.CALL_PACKING] = figures.packing_efficiency
            metrics |= {name.format(call=call): value for name, value in of_call.items() if value is not None}
    return metrics


def rank_token_metrics(plan: BatchPlan, tokens_R: Sequence[int], pad_length: int, *, prefix: str) -> dict[str, float]:
    """verl's metrics of what a rank gets, by the layout of the actor's update, or of another call in a step without."""
    if not plan.layouts:  # while a warm-up trains nothing and no pass runs
        return {}
    layout = plan.layouts.get(ACTOR) or next(iter(plan.layouts.values()))
    partitions = np.reshape(layout.order, (layout.dp_size, -1)).tolist()
    found: dict[str, float] = log_seqlen_unbalance([*tokens_R, *[pad_length] * layout.n_pads], partitions, prefix)
    return found


def worker_metrics(
    metrics: dict[str, Any], seconds_before: Mapping[str, float], seconds_after: Mapping[str, float]
) -> dict[str, float]:
    """What the workers have reported about the calls of a step, renamed; their ``padding/`` metrics leave ``metrics``.

    Args:
        metrics: verl's metrics of the step, in which an update's are under ``actor/`` and ``critic/``.
        seconds_before, seconds_after: verl's timers, which run on over the local updates of a global step.
    """
    reported: dict[str, float] = {}
    for update in (call.name for call in CALLS if call.trains):
        for theirs, ours in ((MICRO_BATCHES, names.CALL_MICRO_BATCHES), (PACKING_EFFICIENCY, names.CALL_PACKING)):
            if f"{update}/{theirs}" in metrics:
                reported[ours.format(call=update)] = metrics.pop(f"{update}/{theirs}")
        for theirs, ours in (("allocated", names.CALL_MEMORY), ("reserved", names.CALL_MEMORY_RESERVED)):
            memory = metrics.get(f"{update}/perf/max_memory_{theirs}_gb")
            if memory is not None:
                reported[ours.format(call=update)] = memory
    for call in CALLS:
        if call.timer in seconds_after:
            seconds = seconds_after[call.timer] - seconds_before.get(call.timer, 0.0)
            reported[names.CALL_SECONDS.format(call=call.name)] = seconds
    return reported


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
    timing: dict[str, float] = compute_timing_metrics(batch, timing_raw)
    return timing | compute_throughout_metrics(batch, timing_raw, n_gpus)


def read_session_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Those of a batch in TransferQueue whose rows have their scores."""
    rows = read_fields(batch.keys, batch.partition_id, [SCORES, TURNS])
    scores = rows[SCORES].unbind()
    return session_metrics(
        batch.keys,
        response_R=[len(row) for row in scores],
        score_R=[float(row.sum()) for row in scores],
        turns_R=[float(turns) for turns in rows[TURNS]] if TURNS in rows.keys() else None,  # noqa: SIM118  (a TensorDict)
    )


def session_metrics(
    keys: Sequence[str], response_R: Sequence[int], score_R: Sequence[float], turns_R: Sequence[float] | None = None
) -> dict[str, float]:
    """Rows, response tokens, score (that of its last row) and turns of a session.

    Example:
        Rows ``p_0_0``, ``p_0_1`` and ``p_1_0`` of 5, 3 and 4 response tokens and scores 1, 1 and 0 are sessions of 2
        rows and 1 row, 8 and 4 tokens, scores 1 and 0: the score is 0.5 in the mean.
    """
    sessions = rows_of_sessions(keys)
    metrics: dict[str, float] = {
        names.SESSION_SCORE: sum(score_R[rows[-1]] for rows in sessions) / len(sessions),
        names.SESSION_RESPONSE_LENGTH: sum(response_R) / len(sessions),
        names.SESSION_ROWS: len(keys) / len(sessions),
        names.SESSION_ROWS_MAX: max(map(len, sessions)),
    }
    return metrics if turns_R is None else metrics | {names.SESSION_TURNS: sum(turns_R) / len(sessions)}
