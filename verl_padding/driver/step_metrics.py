"""What is logged each step, under ``padding/`` and in the place of verl's performance metrics: what
pads cost, what the plan does, what the workers say; and what the rows are and teach, over all local
updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, CRITIC
from verl_padding.pads.loss_weighting import Floats
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.plan import BatchPlan, Layout
from verl_padding.plan.cost import Int64s
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key
from verl_padding.worker.losses import MICRO_BATCHES

ADVANTAGES, SCORES = FIELDS = "advantages", "rm_scores"
"""Fields of verl's rows that are read, beside their masks."""


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


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """What the rows of a batch earned, and what they were trained on: columns, in its order."""

    keys: Sequence[str]
    tokens_R: Int64s
    """Tokens of prompt and response."""
    response_R: Int64s
    """Tokens of the response."""
    trained_R: Int64s
    """Tokens that are trained."""
    advantage_R: Floats
    """Mean over these; NaN where there are none."""
    has_advantage_R: npt.NDArray[np.bool_]
    """Whether the advantage of one of these is not exactly 0."""
    reward_R: Floats
    """Score, summed over the tokens."""
    weights_step_R: Sequence[int | None]
    """Global step that has made the oldest weights that sampled each row."""

    @classmethod
    def from_fields(
        cls, batch: KVBatchMeta, fields: TensorDict, mask_R: Sequence[torch.Tensor]
    ) -> Self:
        """What the :data:`FIELDS` of a batch's rows say; ``mask_R``, (response,) each, says which
        tokens are trained."""
        pairs = zip(fields[ADVANTAGES].unbind(), mask_R, strict=True)
        trained = [values[mask.bool()].double() for values, mask in pairs]
        return cls(
            keys=batch.keys,
            tokens_R=np.array(tokens_of_tags(batch.tags)),
            response_R=np.array([len(mask) for mask in mask_R]),
            trained_R=np.array([len(values) for values in trained]),
            advantage_R=np.array([float(values.mean()) for values in trained]),
            has_advantage_R=np.array([bool(values.any()) for values in trained]),
            reward_R=np.array([float(score.double().sum()) for score in fields[SCORES].unbind()]),
            weights_step_R=[tag.get("min_global_steps") for tag in batch.tags],
        )


def session_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Sessions, their rows, and their scores, which are those of their last rows.

    Example:
        Rows ``p_0_0``, ``p_0_1`` and ``p_1_0`` with the scores 1, 1 and 0 are sessions of 2 rows
        and 1 row, with the scores 1 and 0: the score is 0.5 in the mean.
    """
    rows_S, score_S = [], []
    for rows in rows_of:
        for session in rows_of_sessions(rows.keys):
            rows_S.append(len(session))
            score_S.append(rows.reward_R[session[-1]])
    return {
        names.SESSION_SCORE: float(np.mean(score_S)),
        "padding/session/arrived/total": len(rows_S),
        "padding/session/rows/mean": float(np.mean(rows_S)),
        "padding/session/rows/max": max(rows_S),
    }


def advantage_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """How many rows and prompts teach nothing, by an advantage of exactly 0 on every trained
    token."""
    teaches_R = np.concatenate([rows.has_advantage_R for rows in rows_of])
    # A prompt teaches if one of its rows does: GRPO gives zeros to all or to none, but a session
    # may have rows without a trained token.
    uid_R = [uid_of_key(key) for rows in rows_of for key in rows.keys]
    teaching = {uid for uid, teaches in zip(uid_R, teaches_R, strict=True) if teaches}
    return {
        "padding/rows/zero_advantage/share": float((~teaches_R).mean()),
        "padding/prompts/zero_advantage/share": 1 - len(teaching) / len(set(uid_R)),
    }
