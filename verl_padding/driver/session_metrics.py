"""Metrics of sessions: means over sessions, where verl's are means over rows and favour sessions of many rows."""

from __future__ import annotations

from collections.abc import Sequence

from verl_padding.job.metric_names import (
    SESSION_RESPONSE_LENGTH,
    SESSION_ROWS,
    SESSION_ROWS_MAX,
    SESSION_SCORE,
    SESSION_TURNS,
)
from verl_padding.pads.queue import KVBatchMeta, read_fields
from verl_padding.plan.row_keys import index_of_key, session_of_key

SCORES, TURNS = "rm_scores", "num_turns"
"""Fields of verl's rows."""


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
    keys: Sequence[str],
    response_R: Sequence[int],
    score_R: Sequence[float],
    turns_R: Sequence[float] | None = None,
) -> dict[str, float]:
    """Rows, response tokens, score and turns of a session.

    Example:
        Rows ``p_0_0``, ``p_0_1`` and ``p_1_0`` of 5, 3 and 4 response tokens and scores 1, 1 and 0 are sessions of 2
        rows and 1 row, 8 and 4 tokens, scores 1 and 0: the score is 0.5 in the mean.

    Args:
        keys: of the rows.
        response_R: response tokens of each row.
        score_R: score of each row; that of the last row of a session is the session's.
        turns_R: turns of each row, if agent loops say them; those of a session are added up.
    """
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows_of.setdefault(session_of_key(key), []).append(row)
    sessions = list(rows_of.values())
    last_S = [max(rows, key=lambda row: index_of_key(keys[row])) for rows in sessions]

    metrics: dict[str, float] = {
        SESSION_SCORE: sum(score_R[row] for row in last_S) / len(sessions),
        SESSION_RESPONSE_LENGTH: sum(response_R) / len(sessions),
        SESSION_ROWS: len(keys) / len(sessions),
        SESSION_ROWS_MAX: max(map(len, sessions)),
    }
    if turns_R is not None:
        metrics[SESSION_TURNS] = sum(turns_R) / len(sessions)
    return metrics
