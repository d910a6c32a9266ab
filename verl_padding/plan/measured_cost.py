"""What micro-batches cost by the clock, and how that is found from measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from verl_padding.plan.cost import CostModel, Int64s

NANOSECONDS = 1_000_000_000
"""Costs are whole numbers: nanoseconds here."""
ROUNDS = 12
"""Times that outliers are weighed anew, and ranks are guessed anew; a fit changes little after three or four."""
OUTLIER = 1.5
"""Residuals beyond this many times the typical one count less, the farther the less (Huber 1964)."""
FEW = 0.1
"""Share of the measured micro-batches that are left out of the emptiest ones, such as those of pads alone."""
LEAST_LAPS = 8
"""Fewer say too little for four coefficients."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """Seconds of a micro-batch whose rows have L_1 .. L_n tokens and T together: a + b T + c sum L_i^2 + d T^2.

    a is what a micro-batch takes whatever it holds, b is for linear layers, c for an attention that keeps rows apart,
    d for one that does not (a mask over all tokens of the micro-batch, as torch's attention has it on a CPU). With d
    above 0 a micro-batch costs more than its rows do alone.

    As a cost model, it prices rows one by one: alone, or as rows of a micro-batch that has ``fill`` tokens, where the
    last term is d L T, which sums to d T^2.
    """

    handling_s: float
    """a: seconds of a micro-batch."""
    per_token_s: float
    """b: seconds of a token."""
    per_square_s: float
    """c: seconds of a pair of tokens of one row."""
    per_pair_s: float
    """d: seconds of a pair of tokens of one micro-batch."""

    least_fill: int = 0
    """Half the tokens of the emptiest micro-batches that were measured: of emptier ones nothing is known."""

    fill: int = 0
    """Tokens of the micro-batch that a row is priced for; 0 for a row alone."""

    def __call__(self, tokens_R: Int64s) -> Int64s:
        """Cost of rows (R,), in nanoseconds, at least 1."""
        tokens = tokens_R.astype(np.float64)
        beside = np.maximum(tokens, float(self.fill))
        seconds = self.per_token_s * tokens + self.per_square_s * tokens**2 + self.per_pair_s * tokens * beside
        # Elementwise in float64: the same on every machine.
        return np.maximum(np.rint(seconds * NANOSECONDS), 1).astype(np.int64)

    def at(self, fill: int) -> MeasuredCost:
        """The same, for rows of micro-batches that have ``fill`` tokens."""
        return replace(self, fill=fill)

    def together(self, tokens_R: Int64s) -> int:
        """What the rows of a micro-batch cost beside what each costs alone: d (T^2 - sum L_i^2), in nanoseconds.

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


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Seconds of a micro-batch, with what each rank that it may have been computed.

    One rank where a clock tells computing from waiting; else all ranks that meet there, of which the slowest took them.
    """

    seconds: float
    sums_D: tuple[tuple[int, int], ...]
    """Of each rank, the tokens of its computed rows, and the sum of their squares."""

    @classmethod
    def of(cls, seconds: float, tokens_D: Iterable[Sequence[int]]) -> Measurement:
        """From the tokens of each rank's computed rows."""
        return cls(seconds=seconds, sums_D=tuple((sum(t), sum(n * n for n in t)) for t in tokens_D))


def fit_cost(measurements: Sequence[Measurement]) -> MeasuredCost | None:
    """The coefficients that foretell the measurements best; None if they say too little.

    Non-negative least squares of relative residuals. Stragglers count less: weights are Huber's, from the median of the
    absolute residuals. Where only the slowest rank's seconds are known, each round takes them for the rank that the
    last round holds to be the slowest. The same measurements give the same coefficients.
    """
    known = [each for each in measurements if each.seconds > 0]
    if len(known) < LEAST_LAPS:
        return None
    seconds = np.array([each.seconds for each in known])
    terms_ND = [_terms(each.sums_D) for each in known]
    # At first, the rank with the most tokens.
    terms = np.array([terms_D[terms_D[:, 1].argmax()] for terms_D in terms_ND])
    weights, best = np.ones(len(known)), np.zeros(4)
    for _ in range(ROUNDS):
        best = _non_negative(terms / seconds[:, None], np.ones(len(known)), weights)
        terms = np.array([terms_D[(terms_D @ best).argmax()] for terms_D in terms_ND])
        residual = np.abs(terms @ best / seconds - 1)
        typical = OUTLIER * max(float(np.median(residual)) / 0.6745, 1e-9)  # of a normal distribution
        weights = np.minimum(1.0, typical / np.maximum(residual, 1e-12))
    if not best[1:].any():
        return None
    handling, per_token, per_square, per_pair = best.tolist()
    return MeasuredCost(
        handling_s=handling,
        per_token_s=per_token,
        per_square_s=per_square,
        per_pair_s=per_pair,
        least_fill=int(np.quantile([max(tokens for tokens, _ in each.sums_D) for each in known], FEW)) // 2,
    )


def micro_batch_cost(cost_model: CostModel, tokens_I: Sequence[int]) -> int:
    """What a micro-batch costs, by the tokens of its computed rows; with a measured cost, its handling too."""
    tokens = np.array(tokens_I, dtype=np.int64)
    cost = int(cost_model(tokens).sum())
    if isinstance(cost_model, MeasuredCost):
        cost += cost_model.together(tokens) + cost_model.handling
    return cost


def _terms(sums_K: Sequence[tuple[int, int]]) -> Floats:
    """(1, T, sum of squares, T^2) of each micro-batch."""
    return np.array([(1, tokens, squares, tokens**2) for tokens, squares in sums_K], dtype=np.float64)


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
