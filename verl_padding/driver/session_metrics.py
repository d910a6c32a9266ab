"""Metrics of sessions: means over sessions, where verl's are means over rows and favour sessions of many rows."""

from __future__ import annotations

from collections.abc import Sequence

from verl_padding.job import metric_names as names
from verl_padding.pads.queue import KVBatchMeta, read_fields_of_some
from verl_padding.plan.row_keys import rows_of_sessions

SCORES, TURNS = "rm_scores", "num_turns"
"""Fields of verl's rows."""


def read_session_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Those of a batch in TransferQueue whose rows have their scores."""
    rows = read_fields_of_some(batch.keys, batch.partition_id, [SCORES, TURNS])
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
