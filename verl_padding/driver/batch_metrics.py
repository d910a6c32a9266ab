"""What the rows of a step are, teach and have in common, logged under ``padding/``: over all of its local updates."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig

from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.job import metric_names as names
from verl_padding.job.left_out import OF_REWARDS
from verl_padding.plan.row_keys import index_of_key, rows_of_sessions, uid_of_key

ROWS_QUANTILES, TOKENS_QUANTILES = (50, 90, 99), (10, 50, 90, 99)
"""Percentiles of the rows of a session, and of the tokens of a row."""


def row_metrics(rows_of: Sequence[TrainedRows], algorithm: DictConfig) -> dict[str, float]:
    """All of these but ages, of the rows of each local update of a step, by the job's section ``algorithm``."""
    return {
        **session_metrics(rows_of),
        **token_metrics(rows_of),
        **advantage_metrics(rows_of, algorithm),
        **shared_metrics(rows_of),
    }


def session_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Rows, response tokens, score (that of its last row) and turns of a session.

    Example:
        Rows ``p_0_0``, ``p_0_1`` and ``p_1_0`` of 5, 3 and 4 response tokens and scores 1, 1 and 0 are sessions of 2
        rows and 1 row, 8 and 4 tokens, scores 1 and 0: the score is 0.5 in the mean.
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
        names.SESSION_RESPONSE_LENGTH: sum(int(rows.response_R.sum()) for rows in rows_of) / len(rows_S),
        names.SESSION_ROWS: float(rows_S.mean()),
        names.SESSION_ROWS_MAX: int(rows_S.max()),
        **_quantiles(names.SESSION_ROWS_QUANTILE, rows_S, ROWS_QUANTILES),
    }
    turns = [float(rows.turns_R.sum()) for rows in rows_of if rows.turns_R is not None]
    if turns:
        metrics[names.SESSION_TURNS] = sum(turns) / len(rows_S)
    return metrics


def token_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Quantiles of the tokens of a row, prompt and response."""
    return _quantiles(names.ROW_TOKENS_QUANTILE, np.concatenate([rows.tokens_R for rows in rows_of]), TOKENS_QUANTILES)


def age_metrics(rows_of: Sequence[TrainedRows], step: int) -> dict[str, float]:
    """Steps from the oldest weights that sampled a row to its update; none if the rows do not say."""
    ages = [step - 1 - made_by for rows in rows_of for made_by in rows.weights_step_R if made_by is not None]
    return {names.ROW_AGE: sum(ages) / len(ages), names.ROW_AGE_MAX: max(ages)} if ages else {}


def advantage_metrics(rows_of: Sequence[TrainedRows], algorithm: DictConfig) -> dict[str, float]:
    """How many rows and prompts teach nothing, and why: an advantage of exactly 0 on every trained token, and sessions
    of a prompt that have all earned the same, the best or the worst of the step."""
    prompts = [(rows, sessions) for rows in rows_of for sessions in _sessions_of_prompts(rows.keys)]
    scores_P = [rows.reward_R[[session[-1] for session in sessions]] for rows, sessions in prompts]
    teaches_P = np.array([rows.has_advantage_R[np.concatenate(sessions)].any() for rows, sessions in prompts])
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
    if algorithm.adv_estimator in OF_REWARDS and not algorithm.use_kl_in_reward:
        metrics[names.PROMPTS_ROUNDED] = int((equal_P & teaches_P).sum())
    return metrics


def shared_metrics(rows_of: Sequence[TrainedRows]) -> dict[str, float]:
    """Rows that begin like the row before them in their session, and extend no row of it; and trained tokens that are
    trained in several rows."""
    n_parted = parted_tokens = trained_again = 0
    for rows in rows_of:
        sessions = [session for session in rows_of_sessions(rows.keys) if len(session) > 1]
        if not sessions:
            continue
        continued_R = continued_rows(rows)
        before, row = np.array([pair for session in sessions for pair in pairwise(session)]).T
        assert rows.forest is not None, "rows of sessions of several rows are compared"
        shared = rows.forest.shared_by_pairs(before, row)
        shortest = np.minimum(rows.tokens_R[before], rows.tokens_R[row])
        parted = (shared > 0) & (shared < shortest) & (continued_R[row] < 0)
        n_parted += int(parted.sum())
        parted_tokens += int(shared[parted].sum())
        trained_again += sum(_trained_again(rows, session, continued_R) for session in sessions)
    return {
        names.ROWS_PARTED: n_parted,
        names.ROWS_PARTED_TOKENS: parted_tokens,
        names.TRAINED_AGAIN_TOKENS: trained_again,
    }


def continued_rows(rows: TrainedRows) -> npt.NDArray[np.int64]:
    """Number of the row that each row goes on from: the longest shorter one before it in its session that it begins
    with; -1 for none."""
    assert rows.forest is not None, "rows of sessions of several rows are compared"
    continued_R = np.full(len(rows.keys), -1)
    session_R = np.zeros(len(rows.keys), dtype=np.int64)
    for number, session in enumerate(rows_of_sessions(rows.keys)):
        session_R[session] = number
    order, shared_I = rows.forest.shared_among(np.arange(len(rows.keys)), session_R)
    index_R = list(map(index_of_key, rows.keys))
    # From the last row of each tree to its first, beginnings come before the rows that begin with them.
    begins: list[int] = []
    with_last = 0
    for row, with_next in zip(order[::-1].tolist(), shared_I[::-1].tolist(), strict=True):
        while begins and rows.tokens_R[begins[-1]] > with_last:  # with_last is 0 between sessions
            begins.pop()
        for earlier in reversed(begins):
            if rows.tokens_R[earlier] < rows.tokens_R[row] and index_R[earlier] < index_R[row]:
                continued_R[row] = earlier
                break
        begins.append(row)
        with_last = with_next
    return continued_R


def _trained_again(rows: TrainedRows, session: Sequence[int], continued_R: npt.NDArray[np.int64]) -> int:
    """Trained tokens of a session's rows that are trained in a row that they go on from, too."""
    prompt_R = rows.tokens_R - rows.response_R
    if not any(continued_R[row] >= 0 and prompt_R[row] < rows.tokens_R[continued_R[row]] for row in session):
        return 0
    again, trained_of = 0, dict[int, npt.NDArray[np.bool_]]()
    for row in session:  # a row comes after the one that it goes on from
        trained = np.zeros(rows.tokens_R[row], dtype=np.bool_)
        trained[prompt_R[row] :] = rows.mask_R[row].numpy()
        if (earlier := int(continued_R[row])) >= 0:
            begin = trained[: rows.tokens_R[earlier]]
            again += int((begin & trained_of[earlier]).sum())
            begin |= trained_of[earlier]
        trained_of[row] = trained
    return again


def _sessions_of_prompts(keys: Sequence[str]) -> Iterator[list[list[int]]]:
    """The rows of each session, by prompt."""
    sessions_of: dict[str, list[list[int]]] = {}
    for session in rows_of_sessions(keys):
        sessions_of.setdefault(uid_of_key(keys[session[0]]), []).append(session)
    return iter(sessions_of.values())


def _quantiles(name: str, values: npt.NDArray[np.int64], percents: Sequence[int]) -> dict[str, float]:
    found = np.percentile(values, percents)
    return {name.format(percent=percent): float(value) for percent, value in zip(percents, found, strict=True)}
