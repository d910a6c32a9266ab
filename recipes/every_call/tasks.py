"""Tasks for an agent whose context grows: what it starts with, what answers each reply, what the
session earns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Messages = list[dict[str, Any]]

TINY_SOURCE = "verl_padding/doors"
GSM8K_SOURCE = "openai/gsm8k"


class Task(Protocol):
    """One session's state, made from a row of the data. It answers each reply, until it is done."""

    def messages(self) -> Messages:
        """What the context starts with."""
        ...

    def react(self, reply: str) -> str:
        """Takes in a reply, and returns what the agent is told next; of no use once the task is
        done."""
        ...

    @property
    def done(self) -> bool:
        """Whether the session is over."""
        ...

    @property
    def reward(self) -> float:
        """What the session has earned so far, in [0, 1]."""
        ...

    @property
    def info(self) -> dict[str, float]:
        """Further figures of the session, for verl's reward metrics."""
        ...


DOORS = 4
REPEATS = 8
"""What is told is repeated, so that a tiny attention has more to see."""
SEARCH_CREDIT = 0.5
"""Reward for having tried all doors and found nothing; a share of it for some of them. The first
thing to learn."""


class Doors:
    """Find the prize: it is behind one of the doors 1 to 4, and no door may be tried twice.

    A reply is the number of a door. An empty one is told, and the search goes on; it ends with the
    prize, which earns 1, or with a reply that is no door or an empty one again. That earns 0.5 x
    the share of the doors that were tried. The only way to always find the prize is to try doors
    that were not tried yet, which only the context tells.

    Example:
        Prize ``"3"``: the agent starts with ``????????``. After the reply ``2`` it is told
        ``22222222``, after ``3`` it has the prize. Replies ``2`` and ``2`` earn 0.5 x 1 / 4.
    """

    def __init__(self, prize: str):
        if prize not in _doors():
            raise ValueError(
                f"prize {prize!r}: must be the number of a door, {', '.join(_doors())}"
            )
        self._prize = prize
        self._empty: list[str] = []
        self._found = self._failed = False

    def messages(self) -> Messages:
        return [{"role": "user", "content": "?" * REPEATS}]

    def react(self, reply: str) -> str:
        door = reply[:1]
        if door == self._prize:
            self._found = True
        elif door not in _doors() or door in self._empty:
            self._failed = True
        else:
            self._empty.append(door)
        return door * REPEATS

    @property
    def done(self) -> bool:
        return self._found or self._failed

    @property
    def reward(self) -> float:
        return 1.0 if self._found else SEARCH_CREDIT * len(self._empty) / DOORS

    @property
    def info(self) -> dict[str, float]:
        return {"acc": float(self._found), "tried": float(len(self._empty) + self._found)}


def _doors() -> list[str]:
    return [str(number) for number in range(1, DOORS + 1)]


QUESTION = '{question}\n\nThink step by step, and end with your answer as "#### <number>".'
NO_ANSWER = 'There is no answer in the form "#### <number>". Give it.'
NOT_RIGHT = "That is not right. Look for the mistake, and answer again."


class CheckedMath:
    """A GSM8K question whose answers are checked: a wrong one may be mended, with all that was said
    in the context.

    The session ends with the right answer, which earns what verl's own GSM8K scorer gives; a later
    one earns less, by a tenth for each wrong answer before it.
    """

    def __init__(self, question: str, answer: str):
        self._question = question
        self._answer = answer
        self._wrong = 0
        self._score = 0.0

    def messages(self) -> Messages:
        return [{"role": "user", "content": QUESTION.format(question=self._question)}]

    def react(self, reply: str) -> str:
        from verl.utils.reward_score import default_compute_score

        self._score = float(default_compute_score(GSM8K_SOURCE, reply, self._answer))
        if not self.done:
            self._wrong += 1
        return NOT_RIGHT if "####" in reply else NO_ANSWER

    @property
    def done(self) -> bool:
        return self._score > 0

    @property
    def reward(self) -> float:
        return max(0.0, self._score - 0.1 * self._wrong)

    @property
    def info(self) -> dict[str, float]:
        return {"acc": self._score, "wrong_answers": float(self._wrong)}


TASKS: Mapping[str, Callable[[Mapping[str, Any]], Task]] = {
    TINY_SOURCE: lambda row: Doors(row["reward_model"]["ground_truth"]),
    GSM8K_SOURCE: lambda row: CheckedMath(
        row["raw_prompt"][-1]["content"], row["reward_model"]["ground_truth"]
    ),
}
"""``data_source`` of a row -> its task."""


def task_of(row: Mapping[str, Any]) -> Task:
    """The task of a row of verl's parquet data.

    Raises:
        ValueError: there is no task for this ``data_source``.
    """
    source = row["data_source"]
    if source not in TASKS:
        raise ValueError(f"data_source={source!r}: no task for it. Choices: {', '.join(TASKS)}.")
    return TASKS[source](row)
