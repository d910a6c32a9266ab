"""Whether a run has learned its task, and kept what it had learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from verl_padding.plan.counted import counted

LAST = 10
"""Steps at the end of a run that count as its result."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a recipe is known to reach.

    Attributes:
        reward: mean reward of a session that the mean over the last steps has to reach.
        floor: no step may fall below it once a step has reached `reward`.
        steps: steps that the recipe is made for; a shorter run need not have learned.
    """

    reward: float
    floor: float
    steps: int


@dataclass(frozen=True)
class Learning:
    """The mean reward of a session at each step of a run (one at least), against its recipe's goal."""

    rewards: Sequence[float]
    goal: Goal

    @property
    def first(self) -> float:
        """At the first step."""
        return self.rewards[0]

    @property
    def last(self) -> float:
        """The mean over the last `LAST` steps."""
        return fmean(self.rewards[-LAST:])

    @property
    def reached(self) -> int | None:
        """The first step, counted from 1, that reaches the goal."""
        return next((step for step, reward in enumerate(self.rewards, start=1) if reward >= self.goal.reward), None)

    @property
    def lowest(self) -> float | None:
        """The lowest reward of a step from there on."""
        return None if self.reached is None else min(self.rewards[self.reached - 1 :])

    @property
    def learned(self) -> bool | None:
        """Whether the goal was reached and held; None if it was not, but the run was too short."""
        if self.last >= self.goal.reward and self.lowest is not None and self.lowest >= self.goal.floor:
            return True
        return None if len(self.rewards) < self.goal.steps else False

    def __str__(self) -> str:
        """The verdict, and the figures that it rests on."""
        goal, steps = self.goal, len(self.rewards)
        verdict = {
            True: "The agent has learned its task",
            False: "The agent has not learned its task",
            None: f"{counted(steps, 'step')} cannot show whether the agent learns; the recipe is made for {goal.steps}",
        }[self.learned]
        if self.reached is None:
            then = "no step reached it"
        else:
            then = f"step {self.reached} was the first to reach it, the lowest reward since then is {self.lowest:.3f}"
        return (
            f"{verdict}: the mean reward of a session is {self.last:.3f} over the last {min(LAST, steps)} steps, after "
            f"{self.first:.3f} at the first step. The goal is {goal.reward}, and never below {goal.floor} after that; "
            f"{then}."
        )
