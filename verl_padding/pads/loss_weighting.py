"""What the rows of a mini-batch weigh in its loss: what their agent loop says, and each session the
same if asked for.

With w_r the weight of row r, and l_r its loss, the loss of a mini-batch is the sum of w_r l_r over
its denominator. verl has no place for a weight. So the loss stays verl's, and the gradient of each
row's outputs is multiplied by a factor (:func:`loss_factors`). That is exact for every loss that is
a sum over rows or tokens, whatever its terms are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_padding.errors import PaddingDataError, plural
from verl_padding.plan import Layout
from verl_padding.plan.row_keys import session_of_key

Floats = npt.NDArray[np.float64]
ACTOR = "actor"
"""The update whose rows may weigh differently, and may be left out."""
LOSS_WEIGHT = "loss_weight"
"""Field of a row: what it weighs in the loss, 0 or from 1e-9 to 1e9. A row without it weighs 1."""
TOKEN_MODES = TOKEN_MEAN, TOKEN_SUM = "token-mean", "token-sum"
"""The modes of verl's losses that weigh tokens; all others weigh rows."""
MEAN_OF_TOKENS = "seq-mean-token-mean"
"""The mode in which the loss of a row is a mean over its tokens, and not their sum."""


@dataclass(frozen=True, kw_only=True)
class LossWeighting:
    """How the actor's loss weighs its rows."""

    mode: str
    """verl's ``loss_agg_mode`` of its loss."""
    divides_by_rows: bool = True
    """Whether a mode that weighs rows divides by their number in the mini-batch, and not by a
    configured one."""
    by_session: bool = False
    """Whether each session of a mini-batch weighs the same."""
    refusal: str = ""
    """Why its rows cannot weigh differently, if they cannot."""


def loss_factors(
    layout: Layout,
    keys: Sequence[str],
    weight_R: Sequence[float],
    loss_tokens_R: Sequence[int],
    weighting: LossWeighting,
) -> list[float]:
    """What the gradient of each real row's outputs is multiplied by.

    verl divides by R, the rows of the mini-batch that have a token with a loss, or by a configured
    number N; with ``token-mean`` by T = sum of n_r, the tokens of row r that have a loss; with
    ``token-sum`` by nothing. So the factor is w_r R / sum of w, w_r, w_r T / sum of w_r n_r, and
    w_r. Rows without a token with a loss are in no sum. Weights of 1 give factors of exactly 1.

    If sessions weigh the same, modes that weigh rows give what they would give if each session of
    the mini-batch were one row. With n_s tokens of a row's session, and S the sum of w_r n_r / n_s,
    which is the number of sessions with a loss where all w_r are 1, the factor is w_r n_r / n_s R /
    S with ``seq-mean-token-mean``, and w_r R / S with the others. Where tokens weigh, the weight of
    a row is w_r / n_s.

    Keys, weights and tokens that have a loss are those of the real rows. If all rows of a
    mini-batch that have a loss weigh 0, a PaddingDataError refuses them.
    """
    factor_R = np.zeros(len(keys))
    weights, tokens = np.array([weight_R, loss_tokens_R], dtype=np.float64)
    for number, rows_of in enumerate(layout.rows_M):
        rows = list(rows_of)
        with_loss = [row for row in rows if tokens[row]]
        if with_loss and not weights[with_loss].any():
            raise PaddingDataError(
                f"row {keys[with_loss[0]]!r}: {LOSS_WEIGHT}={weight_R[with_loss[0]]}, as in all "
                f"rows of mini-batch {number} of {ACTOR!r} with a trained token "
                f"({plural(len(with_loss), 'row')}). Leave such rows out."
            )
        factor_R[rows] = _factors(
            [keys[row] for row in rows], weights[rows], tokens[rows], weighting
        )
    return factor_R.tolist()


def _factors(keys: Sequence[str], w: Floats, n: Floats, weighting: LossWeighting) -> Floats:
    """Of rows of a mini-batch with weights ``w`` and ``n`` tokens that have a loss."""
    # token-mean, weights 1 and 3, 4 tokens each: T = 8 over 1 * 4 + 3 * 4 = 16 gives factors of 0.5
    # and 1.5.
    counts = w * (n > 0)
    if weighting.by_session:
        # Rows of 1 and 3 tokens of one session count as a quarter and three quarters of a row.
        counts = w * _shares_of_sessions(keys, n)
        if weighting.mode in TOKEN_MODES:
            w = np.divide(counts, n, out=np.zeros_like(n), where=n > 0)
        elif weighting.mode == MEAN_OF_TOKENS:
            w = counts
    with np.errstate(over="ignore"):
        if weighting.mode == TOKEN_MEAN:
            return w * _over(n.sum(), (w * n).sum())
        if weighting.mode != TOKEN_SUM and weighting.divides_by_rows:
            return w * _over((n > 0).sum(), counts.sum())
    return w


def _shares_of_sessions(keys: Sequence[str], tokens: Floats) -> Floats:
    """The part of its session's tokens that each row has; 0 where a session has none."""
    _, session_R = np.unique([session_of_key(key) for key in keys], return_inverse=True)
    return tokens / np.maximum(np.bincount(session_R, tokens)[session_R], 1)


def _over(numerator: float, denominator: float) -> float:
    # Nothing over nothing: no token of the rows has a loss, so the factor multiplies a gradient of
    # 0.
    return float(numerator / denominator) if denominator else 0.0
