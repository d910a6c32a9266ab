"""What micro-batches cost by the clock, and how that is found from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from verl_padding.plan.cost import CostModel, Int64s

NANOSECONDS = 1_000_000_000
"""Costs are whole numbers: nanoseconds here."""
PAD_HANDLING = 100_000
"""Nanoseconds that handling a pad takes: a tenth of a millisecond (``PAD_HANDLING_TOKENS`` in ``call_costs.py``)."""
ROUNDS = 12
"""Times that outliers are weighed anew, and ranks are guessed anew; a fit changes little after three or four."""
OUTLIER = 1.5
"""Residuals beyond this many times the typical one count less, the farther the less (Huber 1964)."""
FEW = 0.1
"""Share of the measured micro-batches that are left out of the emptiest ones, such as those of pads alone."""
PACE_PRIOR = 4
"""A rank's pace is held to be the others', as firmly as this many micro-batches would say it."""
LEAST_LAPS = 8
"""Fewer say too little for four coefficients."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """Seconds of a micro-batch: a + b T + c Q + d (T^2 - Q), with rows of L_1 .. L_n tokens, T together, Q = sum L_i^2.

    a is what a micro-batch takes whatever it holds, b is for linear layers, c for attention inside of a row. d is for
    an attention that does not keep rows apart (a mask over all tokens of the micro-batch, as torch's attention has it
    on a CPU; a row alone goes without, so c may be below d). With d above 0 a micro-batch costs more than its rows do
    alone.

    As a cost model, it costs rows one by one: alone, or as rows of a micro-batch that has ``fill`` tokens, where the
    last term is d L (T - L), which sums to d (T^2 - Q).
    """

    handling_s: float
    """a: seconds of a micro-batch."""
    per_token_s: float
    """b: seconds of a token."""
    per_square_s: float
    """c: seconds of a pair of tokens of one row."""
    per_pair_s: float
    """d: seconds of a pair of tokens of two rows."""
    least_fill: int = 0
    """Half the tokens of the emptiest micro-batches that were measured: of emptier ones nothing is known."""
    trial_fill: int = 0
    """Tokens of the micro-batches that a plan is to try, whatever they cost; 0 for a plan that chooses."""
    fill: int = 0
    """Tokens of the micro-batch that a row is priced for; 0 for a row alone."""

    def __call__(self, tokens_R: Int64s) -> Int64s:
        """Cost of rows (R,), in nanoseconds, at least 1."""
        tokens = tokens_R.astype(np.float64)
        beside = np.maximum(self.fill - tokens, 0.0)
        seconds = self.per_token_s * tokens + self.per_square_s * tokens**2 + self.per_pair_s * tokens * beside
        # Elementwise in float64: the same on every machine.
        return np.maximum(np.rint(seconds * NANOSECONDS), 1).astype(np.int64)

    def at(self, fill: int) -> MeasuredCost:
        """The same, for rows of micro-batches that have ``fill`` tokens."""
        return replace(self, fill=fill)

    def together(self, tokens_R: Int64s) -> int:
        """What the rows of a micro-batch cost beside what each costs alone: d (T^2 - Q), in nanoseconds.

        0 if rows are priced for a micro-batch already.
        """
        if self.fill or not self.per_pair_s:
            return 0
        tokens = tokens_R.astype(np.float64)
        return int(np.rint(self.per_pair_s * (tokens.sum() ** 2 - (tokens**2).sum()) * NANOSECONDS))

    @property
    def handling(self) -> int:
        """What a micro-batch costs, whatever it holds, in nanoseconds."""
        return int(np.rint(self.handling_s * NANOSECONDS))

    def seconds(self, tokens_K: Sequence[Sequence[int]]) -> Floats:
        """Seconds of micro-batches, from the tokens of their computed rows."""
        return _terms([(sum(t), sum(n * n for n in t)) for t in tokens_K]) @ np.array(astuple(self)[:4])

    def predict(self, measurement: Measurement) -> float:
        """Seconds of the slowest rank of a measurement."""
        return float((_terms(measurement.sums_D) @ np.array(astuple(self)[:4])).max())


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of a micro-batch, with what each rank that it may have been computed.

    One rank where a clock tells computing from waiting; else all ranks that meet there, of which the slowest took them.
    """

    seconds: float
    sums_D: tuple[tuple[int, int], ...]
    """Of each rank, the tokens of its computed rows, and the sum of their squares."""

    @classmethod
    def of(
        cls, seconds: float, tokens_D: Sequence[Sequence[int]], shared_D: Sequence[Sequence[int]] | None = None
    ) -> Measurement:
        """From the tokens of each rank's computed rows, and those of them that were computed in another row."""
        pairs_D = zip(tokens_D, shared_D or [()] * len(tokens_D), strict=True)
        sums_D = ((sum(t) - sum(s), sum(n * n for n in t) - sum(n * n for n in s)) for t, s in pairs_D)
        return cls(seconds=seconds, sums_D=tuple(sums_D))

    @property
    def fill(self) -> int:
        """Tokens of the rank that has most."""
        return max(tokens for tokens, _ in self.sums_D)


def fit_cost(measurements: Sequence[Measurement]) -> MeasuredCost | None:
    """The coefficients that predict the measurements best; None if these are too few.

    Non-negative least squares of relative residuals. Stragglers count less: weights are Huber's, from the median of the
    absolute residuals. Where only the slowest rank's seconds are known, each round takes them for the rank that the
    last round holds to be the slowest, by its rows and by its pace: a node may be slower than others, and its seconds
    are not to be put down to what the rows of another rank cost. The same measurements give the same coefficients.
    """
    known = [each for each in measurements if each.seconds > 0]
    if len(known) < LEAST_LAPS:
        return None
    seconds, number_N = np.array([each.seconds for each in known]), np.arange(len(known))
    terms_ND = np.zeros((len(known), max(len(each.sums_D) for each in known), 4))  # ranks that there were not take none
    for number, each in enumerate(known):
        terms_ND[number, : len(each.sums_D)] = _terms(each.sums_D)
    slowest_N = terms_ND[:, :, 1].argmax(axis=1)  # at first, the rank with the most tokens
    pace_D, weights, best = np.ones(terms_ND.shape[1]), np.ones(len(known)), np.zeros(4)
    for _ in range(ROUNDS):
        terms = terms_ND[number_N, slowest_N]
        best = _non_negative(terms * (pace_D[slowest_N] / seconds)[:, None], np.ones(len(known)), weights)
        pace_D = _paces(seconds / np.maximum(terms @ best, 1e-12), slowest_N, pace_D)
        predicted_ND = terms_ND @ best * pace_D
        slowest_N = predicted_ND.argmax(axis=1)
        residual = np.abs(predicted_ND[number_N, slowest_N] / seconds - 1)
        typical = OUTLIER * max(float(np.median(residual)) / 0.6745, 1e-9)  # of a normal distribution
        weights = np.minimum(1.0, typical / np.maximum(residual, 1e-12))
    if not best[1:].any():  # rows have to cost something: where no term of theirs explains the seconds, by their tokens
        best = np.array([0.0, seconds.sum() / terms_ND[number_N, slowest_N, 1].sum(), 0.0, 0.0])
    handling, per_token, per_square, per_pair = best.tolist()
    return MeasuredCost(
        handling_s=handling,
        per_token_s=per_token,
        per_square_s=per_square,
        per_pair_s=per_pair,
        least_fill=int(np.quantile([each.fill for each in known], FEW)) // 2,
    )


def micro_batch_cost(cost_model: CostModel, tokens_I: Sequence[int], shared_I: Sequence[int] = ()) -> int:
    """What a micro-batch costs, by the tokens of its computed rows; with a measured cost, its handling too.

    Args:
        shared_I: tokens of each that are computed in another row; empty for none.
    """
    tokens, shared = np.array(tokens_I, dtype=np.int64), np.array(shared_I or [0] * len(tokens_I), dtype=np.int64)
    cost = int(cost_model(tokens).sum() - cost_model(shared[shared > 0]).sum())
    if isinstance(cost_model, MeasuredCost):
        cost += cost_model.together(tokens - shared) + cost_model.handling
    return cost


def _paces(ratio_N: Floats, slowest_N: Int64s, pace_D: Floats) -> Floats:
    """How many times as long as the mean rank each one takes for the same rows.

    Args:
        ratio_N: of each measurement, its seconds over those predicted for its slowest rank.
        slowest_N: the slowest rank of each.
        pace_D: the paces so far, which stay for a rank that is never the slowest.
    """
    paces = pace_D.copy()
    for rank in np.unique(slowest_N):
        ratios = ratio_N[slowest_N == rank]
        paces[rank] = (PACE_PRIOR + len(ratios) * np.median(ratios)) / (PACE_PRIOR + len(ratios))
    return paces / paces.mean()


def _terms(sums_K: Sequence[tuple[int, int]]) -> Floats:
    """(1, T, Q, T^2 - Q) of each micro-batch."""
    return np.array([(1, tokens, squares, tokens**2 - squares) for tokens, squares in sums_K], dtype=np.float64)


def _non_negative(terms: Floats, target: Floats, weights: Floats) -> Floats:
    """The least squares solution without a negative coefficient: the best of those of each set of columns.

    With four columns there are fifteen sets, and one of them has the solution. Where two are as good, the one with
    fewer columns is taken, and of these the first: what one row a micro-batch cannot tell apart is the rows' own.
    """
    root = np.sqrt(weights)
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1.0
    rows, aim = terms / scale * root[:, None], target * root
    best, least = np.zeros(terms.shape[1]), float((aim**2).sum())
    for size in range(1, terms.shape[1] + 1):
        for columns in map(list, combinations(range(terms.shape[1]), size)):
            solution, *_ = np.linalg.lstsq(rows[:, columns], aim, rcond=None)
            if (solution < 0).any():
                continue
            loss = float(((rows[:, columns] @ solution - aim) ** 2).sum())
            if loss < least * (1 - 1e-6):
                best, least = np.zeros(terms.shape[1]), loss
                best[columns] = solution
    return best / scale
