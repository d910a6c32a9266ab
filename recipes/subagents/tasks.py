"""Tasks for a lead agent and its sub-agents: what each is told, and what a session earns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, Any]]

TINY_SOURCE = "verl_padding/symbol_sum"
GSM8K_SOURCE = "openai/gsm8k"


class NoSuchTaskError(ValueError):
    """A question that no sub-agent can work on; the lead is told so."""


@dataclass
class Outcome:
    """What has happened in a session.

    Attributes:
        answers: question -> reply of the sub-agent.
        n_asked: how often the lead asked, failures included.
        calculated: the last value of the arithmetic tool.
        last_reply: the lead's last words.
    """

    answers: dict[str, str] = field(default_factory=dict)
    n_asked: int = 0
    calculated: str | None = None
    last_reply: str = ""


class Task(Protocol):
    """A session's task, made from a row of the data."""

    def lead_messages(self) -> Messages:
        """The lead's first messages."""
        ...

    def subagent_messages(self, question: str) -> Messages:
        """A sub-agent's first messages. Raises NoSuchTaskError if it cannot work on the
        question."""
        ...

    def is_done(self, outcome: Outcome) -> bool:
        """Whether the session is over even if the lead would go on."""
        ...

    def reward(self, outcome: Outcome) -> float:
        """What the session has earned, in [0, 1]."""
        ...

    def info(self, outcome: Outcome) -> dict[str, float]:
        """Further figures of the session, for verl's reward metrics."""
        ...


SYMBOLS = "ab"
SYMBOL_REPEATS = 8
MAX_PARTS = 3


class SymbolSum:
    """Add up symbols (a is 1, b is 2) that only sub-agents can read; the right number of them has
    to be asked.

    The lead sees how many parts there are. Its reply ``2`` asks sub-agents for parts 1 and 2; its
    reply ``0`` adds up what they have answered, and ends the session. A sub-agent sees one part,
    and replies its number.

    Example:
        ``"ba"`` shows the lead ``####|####``. After ``2``, one sub-agent sees ``bbbbbbbb`` and
        another ``aaaaaaaa``; they reply ``2`` and ``1``; the lead's ``0`` makes 3, which is right.
    """

    def __init__(self, parts: str):
        if not 1 <= len(parts) <= MAX_PARTS or any(part not in SYMBOLS for part in parts):
            raise ValueError(f"parts {parts!r}: must be 1 to {MAX_PARTS} symbols of {SYMBOLS!r}")
        self._parts = parts
        self._numbers = {
            str(place): SYMBOLS.index(part) + 1 for place, part in enumerate(parts, start=1)
        }

    def lead_messages(self) -> Messages:
        return [{"role": "user", "content": "|".join("####" for _ in self._parts)}]

    def subagent_messages(self, question: str) -> Messages:
        if question not in self._numbers:
            raise NoSuchTaskError(f"there is no part {question}")
        return [{"role": "user", "content": self._parts[int(question) - 1] * SYMBOL_REPEATS}]

    def is_done(self, outcome: Outcome) -> bool:
        return outcome.calculated is not None

    def reward(self, outcome: Outcome) -> float:
        """0.1 for asking at all, 0.1 for as many as there are parts, 0.6 for right replies, 0.1 for
        a sum, 0.1 if it is right: small steps, which a random model can find one after another.
        """
        return (
            0.1 * bool(outcome.n_asked)
            + 0.1 * (outcome.n_asked == len(self._parts))
            + 0.6 * self._share_right(outcome)
            + 0.1 * (outcome.calculated is not None)
            + 0.1 * self._is_right(outcome)
        )

    def info(self, outcome: Outcome) -> dict[str, float]:
        return {"acc": float(self._is_right(outcome)), "parts_right": self._share_right(outcome)}

    def _share_right(self, outcome: Outcome) -> float:
        right = sum(
            outcome.answers.get(place, "")[:1] == str(number)
            for place, number in self._numbers.items()
        )
        return right / len(self._parts)

    def _is_right(self, outcome: Outcome) -> bool:
        return outcome.calculated == str(sum(self._numbers.values()))


LEAD_PROMPT = """{question}

You lead a team. Split the question into parts and ask a sub-agent for each, in one go; a \
sub-agent sees your question to it and nothing else. Use the tools for arithmetic. Give the \
final answer as "#### <number>"."""
SUBAGENT_PROMPT = """{question}

Answer with the number alone, after as much thought as you need; use the tool for arithmetic."""


class DelegatedMath:
    """A GSM8K question that a lead splits among sub-agents; the reward is what verl's own GSM8K
    scorer gives."""

    def __init__(self, question: str, answer: str):
        self._question = question
        self._answer = answer

    def lead_messages(self) -> Messages:
        return [{"role": "user", "content": LEAD_PROMPT.format(question=self._question)}]

    def subagent_messages(self, question: str) -> Messages:
        if not question.strip():
            raise NoSuchTaskError("the question is empty")
        return [{"role": "user", "content": SUBAGENT_PROMPT.format(question=question)}]

    def is_done(self, outcome: Outcome) -> bool:
        return False  # the lead ends it, by a reply that calls no tool

    def reward(self, outcome: Outcome) -> float:
        from verl.utils.reward_score import default_compute_score

        return float(default_compute_score(GSM8K_SOURCE, outcome.last_reply, self._answer))

    def info(self, outcome: Outcome) -> dict[str, float]:
        return {"acc": self.reward(outcome)}


TASKS: Mapping[str, Callable[[Mapping[str, Any]], Task]] = {
    TINY_SOURCE: lambda row: SymbolSum(row["reward_model"]["ground_truth"]),
    GSM8K_SOURCE: lambda row: DelegatedMath(
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
