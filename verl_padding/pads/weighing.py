"""What the rows of a mini-batch weigh in its loss: what their agent loop says, and each session the same if asked for.

With w_r the weight of row r, and l_r its loss, the loss of a mini-batch is the sum of w_r l_r over its denominator.
verl has no place for a weight. So the loss stays verl's, and the gradient of each row's outputs is multiplied by a
factor, which turns it into that of the weighted loss (:func:`loss_factors`). That is exact for every loss that is a sum
over rows or tokens, whatever its terms are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_padding.errors import PaddingDataError
from verl_padding.plan import Layout
from verl_padding.plan.counted import counted
from verl_padding.plan.row_keys import session_of_key

LOSS_WEIGHT = "loss_weight"
"""Field of a row: what it weighs in the loss, a number of at least 0. A row without it weighs 1."""
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""What gradients can be multiplied by: those of low precision are multiplied in 32 bits."""
TOKEN_MODES = TOKEN_MEAN, TOKEN_SUM = "token-mean", "token-sum"
"""The modes of verl's losses that weigh tokens; all others weigh rows."""
MEAN_OF_TOKENS = "seq-mean-token-mean"
"""The mode in which the loss of a row is a mean over its tokens, and not their sum."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How the loss of an update weighs its rows."""

    call: str
    """Name of the update, for messages."""

    mode: str
    """verl's ``loss_agg_mode`` of its loss."""

    by_rows: bool = True
    """Whether a mode that weighs rows divides by their number in the mini-batch, and not by a configured one."""

    by_session: bool = False
    """Whether each session of a mini-batch weighs the same."""

    refusal: str = ""
    """Why its rows cannot weigh differently, if they cannot."""


def loss_factors(
    layout: Layout,
    keys: Sequence[str],
    weight_R: Sequence[float],
    tokens_R: Sequence[int],
    weighing: Weighing,
) -> list[float]:
    """What the gradient of each real row's outputs is multiplied by.

    verl divides by R, the rows of the mini-batch, or by a configured number N; with ``token-mean`` by T = sum of n_r,
    the tokens of row r that have a loss; with ``token-sum`` by nothing. So the factor is w_r R / sum of w, w_r,
    w_r T / sum of w_r n_r, and w_r. Weights of 1 give factors of exactly 1.

    If sessions weigh the same, modes that weigh rows give what they would give if each session of the mini-batch were
    one row. With n_s tokens of a row's session, and S the sum of w_r n_r / n_s, which is the number of sessions where
    all w_r are 1, the factor is w_r n_r / n_s R / S with ``seq-mean-token-mean``, and w_r R / S with the others. Where
    tokens weigh, the weight of a row is w_r / n_s.

    Args:
        keys: keys of the real rows.
        weight_R: weight of each real row.
        tokens_R: tokens of each real row that have a loss.

    Raises:
        PaddingDataError: all rows of a mini-batch that have a loss weigh 0, or their weights are too far apart for a
            factor.
    """
    factor_R = [0.0] * len(keys)
    for number, ranks in enumerate(layout.cells):
        rows = [row for cell in ranks for row in cell if row < layout.n_rows]
        weight_of = {row: weight_R[row] for row in rows}
        tokens_of = {row: tokens_R[row] for row in rows}
        with_loss = [row for row in rows if tokens_of[row]]
        if with_loss and not any(weight_of[row] for row in with_loss):
            raise PaddingDataError(
                f"row {keys[with_loss[0]]!r}: {LOSS_WEIGHT}={weight_of[with_loss[0]]}, and no row of mini-batch "
                f"{number} of {weighing.call!r} that has a token with a loss ({counted(len(with_loss), 'row')}) weighs "
                "more: there is nothing to train on. Give one of them a weight above 0, or let the agent loop leave "
                "such rows out."
            )
        counts_of = weight_of
        if weighing.by_session:
            share_of = _shares_of_sessions(rows, keys, tokens_of)
            counts_of = {row: weight * share_of[row] for row, weight in weight_of.items()}
            if weighing.mode in TOKEN_MODES:
                weight_of = {row: _over(count, tokens_of[row]) for row, count in counts_of.items()}
            elif weighing.mode == MEAN_OF_TOKENS:
                weight_of = counts_of
        share = 1.0
        if weighing.mode == TOKEN_MEAN:
            share = _over(sum(tokens_of.values()), sum(weight_of[row] * tokens_of[row] for row in rows))
        elif weighing.mode != TOKEN_SUM and weighing.by_rows:
            share = _over(len(rows), sum(counts_of.values()))
        for row, weight in weight_of.items():
            factor_R[row] = weight * share
            if tokens_of[row] > 0 and weight_R[row] > 0 and not SMALLEST <= factor_R[row] <= LARGEST:
                raise PaddingDataError(
                    f"row {keys[row]!r}: {LOSS_WEIGHT}={weight_R[row]!r}: in mini-batch {number} of {weighing.call!r} "
                    f"its gradient would be multiplied by {factor_R[row]:.3g}, which is no number of 32 bits. Give "
                    "rows weights that are nearer to each other and to 1."
                )
    return factor_R


def _shares_of_sessions(rows: Sequence[int], keys: Sequence[str], tokens_of: Mapping[int, int]) -> dict[int, float]:
    """The part of its session's tokens that each row has; equal parts where a session has none."""
    rows_of: dict[str, list[int]] = {}
    for row in rows:
        rows_of.setdefault(session_of_key(keys[row]), []).append(row)
    share_of = {}
    for of_session in rows_of.values():
        tokens = sum(tokens_of[row] for row in of_session)
        for row in of_session:
            share_of[row] = tokens_of[row] / tokens if tokens else 1 / len(of_session)
    return share_of


def _over(numerator: float, denominator: float) -> float:
    # Nothing over nothing: no token of the rows has a loss, so the factor multiplies a gradient of 0.
    return numerator / denominator if denominator else 0.0
