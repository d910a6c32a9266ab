"""What the rows of a step are, teach and have in common, logged under ``padding/``: over all of its
local updates."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.job import metric_names as names
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key

ROWS_QUANTILES, TOKENS_QUANTILES = (50, 90, 99), (10, 50, 90, 99)
"""Percentiles of the rows of a session, and of the tokens of a row."""


def row_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Of sessions, tokens and advantages, of the rows of each local update of a step."""
    return {
        **session_metrics(rows_of),
        **token_metrics(rows_of),
        **advantage_metrics(rows_of),
    }


def session_counts(
    rows_of: Sequence[TrainedRows], *, prompts: int, sessions: int, failed: Collection[str]
) -> dict[str, float]:
    """How many sessions a step was configured for, and what became of those that brought no row;
    arrived sessions alone if the rollout has its own number of them.

    Args:
        sessions: of each prompt.
        failed: uids of prompts of which a session has raised an error.
    """
    arrived_of = Counter(
        uid_of_key(rows.keys[session[0]])
        for rows in rows_of
        for session in rows_of_sessions(rows.keys)
    )
    if max(arrived_of.values()) > sessions or len(arrived_of) > prompts:
        return {"padding/session/arrived/total": arrived_of.total()}
    missing = prompts * sessions - arrived_of.total()
    n_failed = sum(sessions - arrived_of[uid] for uid in failed)
    return {
        "padding/session/configured/total": prompts * sessions,
        "padding/session/arrived/total": arrived_of.total(),
        "padding/session/missing/total": missing,
        "padding/session/failed/total": n_failed,
        "padding/session/empty/total": missing - n_failed,
    }


def session_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Rows, response tokens, score (that of its last row) and turns of a session: of a row that
    continues another one, what comes after that.

    Example:
        Rows ``p_0_0``, ``p_0_1`` and ``p_1_0`` of 5, 3 and 4 response tokens and scores 1, 1 and 0
        are sessions of 2 rows and 1 row, 8 and 4 tokens, scores 1 and 0: the score is 0.5 in the
        mean. If ``p_0_0`` has 9 tokens in all, and ``p_0_1`` begins with these and has 14, the
        first session has 5 + 5 tokens.
    """
    sessions_of = [rows_of_sessions(rows.keys) for rows in rows_of]
    rows_S = np.array([len(session) for sessions in sessions_of for session in sessions])
    score_S = [
        rows.reward_R[session[-1]]
        for rows, sessions in zip(rows_of, sessions_of, strict=True)
        for session in sessions
    ]
    # Those after a session's first prompt, however it is split into rows.
    response_tokens = sum(
        int(_added(rows.response_R, rows.tokens_R, rows.continued_R).sum()) for rows in rows_of
    )
    metrics: dict[str, float] = {
        names.SESSION_SCORE: float(np.mean(score_S)),
        "padding/session/response_length/mean": response_tokens / len(rows_S),
        "padding/session/rows/mean": float(rows_S.mean()),
        "padding/session/rows/max": int(rows_S.max()),
        **_quantiles("padding/session/rows/p{percent}", rows_S, ROWS_QUANTILES),
    }
    turns = [
        float(_added(rows.turns_R, rows.turns_R, rows.continued_R).sum())
        for rows in rows_of
        if rows.turns_R is not None
    ]
    if turns:
        metrics["padding/session/num_turns/mean"] = sum(turns) / len(rows_S)
    return metrics


def _added(
    alone_R: npt.NDArray[Any], whole_R: npt.NDArray[Any], continued_R: Sequence[int | None]
) -> npt.NDArray[Any]:
    """What each row adds: ``alone_R`` if it continues no row, else what it has more of ``whole_R``
    than the row that it continues."""
    # Agent loops may count the turns of a row by itself.
    more = [
        alone if earlier is None else max(whole - whole_R[earlier], 0)
        for alone, whole, earlier in zip(alone_R, whole_R, continued_R, strict=True)
    ]
    return np.array(more)


def role_metrics(
    rows_of: Sequence[TrainedRows], roles_of: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Rows of each role, and the mean over sessions of the score of the last of them.

    Args:
        roles_of: role of each row of each local update.
    """
    n_rows: Counter[str] = Counter(role for role_R in roles_of for role in role_R)
    metrics: dict[str, float] = {}
    for role, n in sorted(n_rows.items()):
        scores: list[float] = []
        for rows, role_R in zip(rows_of, roles_of, strict=True):
            role_rows = [row for row, each in enumerate(role_R) if each == role]
            sessions = rows_of_sessions([rows.keys[row] for row in role_rows])
            scores += [rows.reward_R[role_rows[session[-1]]] for session in sessions]
        metrics[f"padding/role/{role}/rows/total"] = n
        metrics[f"padding/role/{role}/score/mean"] = float(np.mean(scores))
    return metrics


def token_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Quantiles of the tokens of a row, prompt and response."""
    return _quantiles(
        "padding/rows/tokens/p{percent}",
        np.concatenate([rows.tokens_R for rows in rows_of]),
        TOKENS_QUANTILES,
    )


def staleness_metrics(rows_of: Sequence[TrainedRows], step: int) -> dict[str, float]:
    """Steps from the oldest weights that sampled a row to its update; none if the rows do not
    say."""
    steps = [
        step - 1 - made_by
        for rows in rows_of
        for made_by in rows.weights_step_R
        if made_by is not None
    ]
    if not steps:
        return {}
    return {
        "padding/rows/staleness/mean": sum(steps) / len(steps),
        "padding/rows/staleness/max": max(steps),
    }


def advantage_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """How many rows and prompts teach nothing, by an advantage of exactly 0 on every trained
    token."""
    teaches_R = np.concatenate([rows.has_advantage_R for rows in rows_of])
    tokens_R = np.concatenate([rows.tokens_R for rows in rows_of])
    # A prompt teaches if one of its rows does: GRPO gives zeros to all or to none, but a session
    # may have rows without a trained token.
    uid_R = [uid_of_key(key) for rows in rows_of for key in rows.keys]
    teaching = {uid for uid, teaches in zip(uid_R, teaches_R, strict=True) if teaches}
    return {
        "padding/rows/zero_advantage/share": float((~teaches_R).mean()),
        "padding/rows/zero_advantage/tokens_share": float(
            tokens_R[~teaches_R].sum() / tokens_R.sum()
        ),
        "padding/prompts/zero_advantage/share": 1 - len(teaching) / len(set(uid_R)),
    }


def _quantiles(
    name: str, values: npt.NDArray[np.int64], percents: Sequence[int]
) -> dict[str, float]:
    found = np.percentile(values, percents)
    return {
        name.format(percent=percent): float(value)
        for percent, value in zip(percents, found, strict=True)
    }
