"""The formula of each advantage estimator of verl's v1 trainer, written out for samples that are
lists of actions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev


@dataclass(frozen=True)
class Sample:
    """The trained tokens of a session."""

    uid: str
    reward: float
    values: Sequence[float]
    penalties: Sequence[float]  # what an in-reward KL takes from each token

    @property
    def score(self):
        return self.reward - sum(self.penalties)

    @property
    def rewards(self):
        """Of each token: the reward is the last one's."""
        given = [-penalty for penalty in self.penalties]
        return [*given[:-1], given[-1] + self.reward] if given else []


def advantages(estimator, samples, gamma, lam):
    """Of each trained token of each sample."""
    match estimator:
        case "gae":
            return whitened([_gae(sample, gamma, lam) for sample in samples])
        case "reinforce_plus_plus":
            return whitened([_discounted(sample.rewards, gamma) for sample in samples])
    found = [[_outcome(estimator, sample, samples)] * len(sample.values) for sample in samples]
    return whitened(found) if estimator == "reinforce_plus_plus_baseline" else found


def returns(estimator, samples, gamma, lam):
    """Of each trained token of each sample."""
    match estimator:
        case "gae":
            return [
                [a + v for a, v in zip(_gae(s, gamma, lam), s.values, strict=True)] for s in samples
            ]
        case "reinforce_plus_plus":
            return [_discounted(sample.rewards, gamma) for sample in samples]
    return advantages(estimator, samples, gamma, lam)


def _gae(sample, gamma, lam):
    following = [*sample.values, 0.0][1:]
    deltas = [
        r + gamma * n - v for r, n, v in zip(sample.rewards, following, sample.values, strict=True)
    ]
    return _discounted(deltas, gamma * lam)


def _discounted(numbers, by):
    """The sum of each number and all later ones."""
    return list(itertools.accumulate(reversed(numbers), lambda later, number: number + by * later))[
        ::-1
    ]


def _outcome(estimator, sample, samples):
    score, group = sample.score, [other for other in samples if other.uid == sample.uid]
    scores = [other.score for other in group]
    match estimator:
        case "grpo" | "grpo_vectorized":
            return (score - mean(scores)) / (stdev(scores) + 1e-6)
        case "rloo" | "rloo_vectorized":
            return score - (sum(scores) - score) / (len(scores) - 1)
        case "opo":
            lengths = [len(other.values) for other in group]
            return score - sum(map(math.prod, zip(lengths, scores, strict=True))) / sum(lengths)
        case "gpg":
            return (
                len(samples) / max(sum(s.score != 0 for s in samples), 1) * (score - mean(scores))
            )
        case "grpo_passk":
            best, second = sorted(scores, reverse=True)[:2]
            return (best - second) / (stdev(scores) + 1e-6) if score == best else 0.0
        case "reinforce_plus_plus_baseline":
            return score - mean(scores)
    raise AssertionError(f"{estimator}: its formula is not written out here")


def whitened(rows):
    """verl's masked_whiten, with the variance of a sample."""
    numbers = [number for row in rows for number in row]
    middle = mean(numbers)
    variance = sum((number - middle) ** 2 for number in numbers) / (len(numbers) - 1)
    return [[(number - middle) / math.sqrt(variance + 1e-8) for number in row] for row in rows]
