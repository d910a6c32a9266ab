"""What the rows of a step are, teach and have in common, logged under ``padding/``: over all of its
local updates."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig

from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.job import metric_names as names
from verl_padding.job.verl_losses import ESTIMATORS, Estimator
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key

ROWS_QUANTILES, TOKENS_QUANTILES = (50, 90, 99), (10, 50, 90, 99)
"""Percentiles of the rows of a session, and of the tokens of a row."""


def row_metrics(rows_of: Sequence[TrainedRows], algorithm: DictConfig) -> dict[str, float]:
    """All of these but ages, of the rows of each local update of a step, by the job's section
    ``algorithm``."""
    return {
        **session_metrics(rows_of),
        **token_metrics(rows_of),
        **advantage_metrics(rows_of, algorithm),
    }


def session_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Rows, response tokens, score (that of its last row) and turns of a session.

    Example:
        Rows ``p_0_0``, ``p_0_1`` and ``p_1_0`` of 5, 3 and 4 response tokens and scores 1, 1 and 0
        are sessions of 2 rows and 1 row, 8 and 4 tokens, scores 1 and 0: the score is 0.5 in the
        mean.
    """
    sessions_of = [rows_of_sessions(rows.keys) for rows in rows_of]
    rows_S = np.array([len(session) for sessions in sessions_of for session in sessions])
    score_S = np.concatenate(
        [
            rows.reward_R[[session[-1] for session in sessions]]
            for rows, sessions in zip(rows_of, sessions_of, strict=True)
        ]
    )
    metrics: dict[str, float] = {
        names.SESSION_SCORE: float(score_S.mean()),
        names.SESSION_RESPONSE_LENGTH: sum(int(rows.response_R.sum()) for rows in rows_of)
        / len(rows_S),
        names.SESSION_ROWS: float(rows_S.mean()),
        names.SESSION_ROWS_MAX: int(rows_S.max()),
        **_quantiles(names.SESSION_ROWS_QUANTILE, rows_S, ROWS_QUANTILES),
    }
    turns = [float(rows.turns_R.sum()) for rows in rows_of if rows.turns_R is not None]
    if turns:
        metrics[names.SESSION_TURNS] = sum(turns) / len(rows_S)
    return metrics


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
            of_role = [row for row, each in enumerate(role_R) if each == role]
            sessions = rows_of_sessions([rows.keys[row] for row in of_role])
            scores += [rows.reward_R[of_role[session[-1]]] for session in sessions]
        metrics[names.ROLE_ROWS.format(role=role)] = n
        metrics[names.ROLE_SCORE.format(role=role)] = float(np.mean(scores))
    return metrics


def token_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Quantiles of the tokens of a row, prompt and response."""
    return _quantiles(
        names.ROW_TOKENS_QUANTILE,
        np.concatenate([rows.tokens_R for rows in rows_of]),
        TOKENS_QUANTILES,
    )


def age_metrics(rows_of: Sequence[TrainedRows], step: int) -> dict[str, float]:
    """Steps from the oldest weights that sampled a row to its update; none if the rows do not
    say."""
    ages = [
        step - 1 - made_by
        for rows in rows_of
        for made_by in rows.weights_step_R
        if made_by is not None
    ]
    return {names.ROW_AGE: sum(ages) / len(ages), names.ROW_AGE_MAX: max(ages)} if ages else {}


def advantage_metrics(rows_of: Sequence[TrainedRows], algorithm: DictConfig) -> dict[str, float]:
    """How many rows and prompts teach nothing, and why: an advantage of exactly 0 on every trained
    token, and sessions of a prompt that have all earned the same, the best or the worst of the
    step."""
    prompts = [(rows, sessions) for rows in rows_of for sessions in _sessions_of_prompts(rows.keys)]
    scores_P = [rows.reward_R[[session[-1] for session in sessions]] for rows, sessions in prompts]
    teaches_P = np.array(
        [rows.has_advantage_R[np.concatenate(sessions)].any() for rows, sessions in prompts]
    )
    equal_P = np.array([len(scores) > 1 and np.ptp(scores) == 0 for scores in scores_P])
    first_P = np.array([scores[0] for scores in scores_P])
    best, worst = max(map(np.max, scores_P)), min(map(np.min, scores_P))
    is_best_P = (first_P == best) & (best > worst or best > 0)
    teaches_R = np.concatenate([rows.has_advantage_R for rows in rows_of])
    tokens_R = np.concatenate([rows.tokens_R for rows in rows_of])
    metrics = {
        names.ROWS_WITHOUT_ADVANTAGE: float((~teaches_R).mean()),
        names.TOKENS_WITHOUT_ADVANTAGE: float(tokens_R[~teaches_R].sum() / tokens_R.sum()),
        names.PROMPTS_WITHOUT_ADVANTAGE: float((~teaches_P).mean()),
        names.PROMPTS_ALL_RIGHT: float((equal_P & is_best_P).mean()),
        names.PROMPTS_ALL_WRONG: float((equal_P & (first_P == worst) & ~is_best_P).mean()),
    }
    # A penalty in the reward differs where scores are equal.
    by_rewards = ESTIMATORS.get(
        algorithm.adv_estimator, Estimator(reads_rewards_alone=False)
    ).reads_rewards_alone
    if by_rewards and not algorithm.use_kl_in_reward:
        metrics[names.PROMPTS_ROUNDED] = int((equal_P & teaches_P).sum())
    return metrics


def _sessions_of_prompts(keys: Sequence[str]) -> Iterator[list[list[int]]]:
    """The rows of each session, by prompt."""
    sessions_of: dict[str, list[list[int]]] = {}
    for session in rows_of_sessions(keys):
        sessions_of.setdefault(uid_of_key(keys[session[0]]), []).append(session)
    return iter(sessions_of.values())


def _quantiles(
    name: str, values: npt.NDArray[np.int64], percents: Sequence[int]
) -> dict[str, float]:
    found = np.percentile(values, percents)
    return {
        name.format(percent=percent): float(value)
        for percent, value in zip(percents, found, strict=True)
    }
