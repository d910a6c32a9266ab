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


@dataclass(frozen=True, kw_only=True)
class Learning:
    """A run's rewards against its recipe's goal.

    Attributes:
        steps: steps of the run.
        first: mean reward of a session at the first step.
        last: its mean over the last `LAST` steps.
        reached: the first step, counted from 1, whose reward reaches the goal's; None if there is none.
        lowest: the lowest reward of a step from there on.
        lowest_at: which step that was.
    """

    goal: Goal
    steps: int
    first: float
    last: float
    reached: int | None
    lowest: float | None
    lowest_at: int | None

    @classmethod
    def of(cls, rewards: Sequence[float], goal: Goal) -> Learning:
        """Judges the mean rewards of a run's steps (one at least), in order."""
        reached = next((step for step, reward in enumerate(rewards, start=1) if reward >= goal.reward), None)
        lowest_at = None
        if reached is not None:
            lowest_at = min(range(reached, len(rewards) + 1), key=lambda step: rewards[step - 1])
        return cls(
            goal=goal,
            steps=len(rewards),
            first=rewards[0],
            last=fmean(rewards[-LAST:]),
            reached=reached,
            lowest=None if lowest_at is None else rewards[lowest_at - 1],
            lowest_at=lowest_at,
        )

    @property
    def learned(self) -> bool | None:
        """Whether the goal was reached and held; None if it was not, but the run was too short to tell."""
        if self.last >= self.goal.reward and self.lowest is not None and self.lowest >= self.goal.floor:
            return True
        return None if self.steps < self.goal.steps else False

    def __str__(self) -> str:
        """The verdict in a sentence or two."""
        goal = self.goal
        over = "at its only step" if self.steps == 1 else f"over the last {min(LAST, self.steps)} steps"
        reward = f"the mean reward of a session is {self.last:.3f} {over}"
        if self.steps > 1:
            reward += f", after {self.first:.3f} at the first step"
        if self.learned is None:
            return (
                f"{counted(self.steps, 'step')} cannot show whether the agent learns; the recipe is made for "
                f"{goal.steps} steps. {reward[0].upper()}{reward[1:]}."
            )
        if self.learned:
            return (
                f"The agent has learned its task: {reward}, and the goal is {goal.reward}. It reached that at step "
                f"{self.reached} and did not fall below {self.lowest:.3f} afterwards."
            )
        if self.lowest is None:
            told = f"no step reached {goal.reward}"
        else:
            told = f"it had reached {goal.reward} at step {self.reached}"
            if self.lowest < goal.floor:
                told += f", but fell to {self.lowest:.3f} at step {self.lowest_at}"
        return (
            f"The agent has not learned its task: {reward}, and {told}. "
            f"The goal is to reach {goal.reward}, and not to fall below {goal.floor} after that."
        )
