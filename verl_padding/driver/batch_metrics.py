"""What the rows of a step are, teach and have in common, logged under ``padding/``: over all of its
local updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from verl_padding.job import metric_names as names
from verl_padding.pads.loss_weighting import Floats
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.plan.cost import Int64s
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key

ADVANTAGES, SCORES = FIELDS = "advantages", "rm_scores"
"""Fields of verl's rows that are read, beside their token ids."""


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
