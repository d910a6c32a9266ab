"""Tasks for an agent whose context is reset each turn: what each turn shows, what ends a session,
what it earns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Messages = list[dict[str, Any]]

TINY_SOURCE = "verl_padding/symbol_path"
PICTURE_SOURCE = "verl_padding/picture_path"
GSM8K_SOURCE = "openai/gsm8k"


class Task(Protocol):
    """One session's state, made from a row of the data. It takes in each reply, and is done at some
    point."""

    def messages(self) -> Messages:
        """The whole context of the next turn; of earlier turns it holds only what the task carries
        over."""
        ...

    def react(self, reply: str) -> None:
        """Takes in the reply of a turn."""
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


SYMBOLS = "ab"
SYMBOL_REPEATS = 8
"""Each turn repeats its symbol, so that a tiny attention has more to see. With more symbols, or
fewer repeats, a tiny model often settles on one reply to all symbols before it has learned to
look."""
FORM_CREDIT = 0.1
"""Reward of a last reply that starts with a digit: the first thing that a random model can
learn."""


class SymbolPath:
    """Walk a path of symbols: each turn shows one, the right reply is its number (a is 1, b is 2,
    ...).

    The session ends with the path, or with the first wrong reply. Its reward is the share of the
    path that was walked, plus a small credit for form.

    Example:
        Path ``"2112"`` shows ``bbbbbbbb``; after the reply ``2`` it shows ``aaaaaaaa``, and so on.
        Two right replies and a wrong digit earn 0.9 * 2 / 4 + 0.1.
    """

    def __init__(self, path: str):
        if not path or any(not "1" <= number <= str(len(SYMBOLS)) for number in path):
            raise ValueError(f"path {path!r}: must be digits from 1 to {len(SYMBOLS)}")
        self._path = path
        self._walked = 0
        self._failed = False
        self._last_is_digit = False

    def messages(self) -> Messages:
        symbol = SYMBOLS[int(self._path[self._walked]) - 1]
        return [{"role": "user", "content": symbol * SYMBOL_REPEATS}]

    def react(self, reply: str) -> None:
        number = reply[:1]
        self._last_is_digit = number.isascii() and number.isdigit()
        if number == self._path[self._walked]:
            self._walked += 1
        else:
            self._failed = True

    @property
    def done(self) -> bool:
        return self._failed or self._walked == len(self._path)

    @property
    def reward(self) -> float:
        share = self._walked / len(self._path)
        return (1 - FORM_CREDIT) * share + FORM_CREDIT * self._last_is_digit

    @property
    def info(self) -> dict[str, float]:
        return {
            "acc": float(self._walked == len(self._path)),
            "walked": self._walked / len(self._path),
        }


class ImagePath(SymbolPath):
    """A :class:`SymbolPath` whose first symbol is shown as an image, and the others as text.

    Its sessions mix rows with and without an image.

    Args:
        image: the message of the first turn, with the image in it.
    """

    def __init__(self, path: str, image: dict[str, Any]):
        super().__init__(path)
        self._image = image

    def messages(self) -> Messages:
        return super().messages() if self._walked else [self._image]


NOTES_PROMPT = """{question}

{notes}Either think one step further and write it down as a note, in a few sentences, or, when you \
are sure, give the final answer as "#### <number>". You will see this question and your notes \
again, and nothing else."""


class NotedMath:
    """A GSM8K question, solved over several turns: each turn sees the question and the notes of
    earlier turns.

    The session ends with a final answer (``#### 42``); its reward is what verl's own GSM8K scorer
    gives.
    """

    def __init__(self, question: str, answer: str):
        self._question = question
        self._answer = answer
        self._notes: list[str] = []
        self._solution: str | None = None

    def messages(self) -> Messages:
        notes = "".join(
            f"Note {number}: {note}\n" for number, note in enumerate(self._notes, start=1)
        )
        if notes:
            notes += "\n"
        return [
            {"role": "user", "content": NOTES_PROMPT.format(question=self._question, notes=notes)}
        ]

    def react(self, reply: str) -> None:
        if "####" in reply:
            self._solution = reply
        else:
            self._notes.append(reply.strip())

    @property
    def done(self) -> bool:
        return self._solution is not None

    @property
    def reward(self) -> float:
        from verl.utils.reward_score import default_compute_score

        if self._solution is None:
            return 0.0
        return float(default_compute_score(GSM8K_SOURCE, self._solution, self._answer))

    @property
    def info(self) -> dict[str, float]:
        return {"acc": self.reward, "answered": float(self.done)}


TASKS: Mapping[str, Callable[[Mapping[str, Any]], Task]] = {
    TINY_SOURCE: lambda row: SymbolPath(row["reward_model"]["ground_truth"]),
    PICTURE_SOURCE: lambda row: ImagePath(
        row["reward_model"]["ground_truth"], row["raw_prompt"][-1]
    ),
    GSM8K_SOURCE: lambda row: NotedMath(
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
