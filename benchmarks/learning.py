"""Whether the agent of a run has learned its task."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from verl_padding.plan.plural import plural

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
        first, last: at the first step, and the mean over the last `LAST` steps.
        reached: the first step, counted from 1, that reaches the goal; None for none.
        lowest: the lowest reward of a step from there on.
        learned: whether the goal was reached and held; None if it was not, but the run was too
            short, or if the reward of a step is unknown (NaN).
    """

    def __init__(self, rewards: Sequence[float], goal: Goal):
        self._steps, self._goal = len(rewards), goal
        self.first, self.last = rewards[0], fmean(rewards[-LAST:])
        self.reached = next(
            (step for step, reward in enumerate(rewards, start=1) if reward >= goal.reward), None
        )
        self.lowest = None if self.reached is None else min(rewards[self.reached - 1 :])
        held = self.last >= goal.reward and self.lowest is not None and self.lowest >= goal.floor
        self._unknown = sum(map(math.isnan, rewards))
        self.learned: bool | None = held or (None if len(rewards) < goal.steps else False)
        if self._unknown:
            self.learned = None

    def __str__(self) -> str:
        goal, steps = self._goal, self._steps
        if self._unknown:
            return (
                "Whether the agent has learned its task is unknown: so are the rewards of "
                f"{self._unknown} of {plural(steps, 'step')}."
            )
        verdict = {
            True: "The agent has learned its task",
            False: "The agent has not learned its task",
            None: (
                f"{plural(steps, 'step')} cannot show whether the agent learns; the recipe is made"
                f" for {goal.steps}"
            ),
        }[self.learned]
        then = "no step reached it"
        if self.reached is not None:
            then = (
                f"step {self.reached} was the first to reach it, the lowest reward since then is"
                f" {self.lowest:.3f}"
            )
        return (
            f"{verdict}: the mean reward of a session is {self.last:.3f} over the last "
            f"{min(LAST, steps)} steps, after {self.first:.3f} at the first step. The goal is "
            f"{goal.reward}, and never below {goal.floor} after that; {then}."
        )
