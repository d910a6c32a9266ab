"""Whether the agent of a run has learned its task."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LAST = 10
"""Steps at the end of a run that count as its result."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a recipe is known to reach."""

    reward: float
    """Of a session: the mean over the last steps has to reach it."""
    floor: float
    """No step may fall below it once a step has reached ``reward``."""
    steps: int
    """That the recipe is made for; a shorter run need not have learned."""


CONTEXT_RESET = Goal(reward=0.95, floor=0.9, steps=60)
SUBAGENTS = Goal(reward=0.6, floor=0.5, steps=60)
EVERY_CALL = Goal(reward=0.75, floor=0.6, steps=60)


class Learning:
    """The mean reward of a session at each step of a run (one at least), against its recipe's goal.

    Attributes:
        last: the mean over the last `LAST` steps.
        reached: the first step, counted from 1, that reaches the goal; None for none.
        lowest: the lowest reward of a step from there on.
        learned: whether the goal was reached and held; None if it was not, but the run was too
            short, or if the reward of a step is unknown (NaN).
    """

    def __init__(self, rewards: Sequence[float], goal: Goal):
        self.last = fmean(rewards[-LAST:])
        self.reached = next(
            (step for step, reward in enumerate(rewards, start=1) if reward >= goal.reward), None
        )
        self.lowest = None if self.reached is None else min(rewards[self.reached - 1 :])
        held = self.last >= goal.reward and self.lowest is not None and self.lowest >= goal.floor
        is_unknown = any(map(math.isnan, rewards)) or not (held or len(rewards) >= goal.steps)
        self.learned = None if is_unknown else held
