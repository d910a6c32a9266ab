"""Faults of showing a job, which must not end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Faults:
    """Faults of reading, showing and keeping what a job says: each is told once, and the job goes on.

    Args:
        tell: shows a sentence. If it fails, there is nothing left to show the sentence with.
    """

    def __init__(self, tell: Callable[[str], object]):
        self._tell = tell
        self._told: set[str] = set()

    @contextmanager
    def told_once(self) -> Iterator[None]:
        """Leaves the block at an exception, which is told unless it was told before."""
        try:
            yield
        except Exception as fault:  # whatever it is: hours of training are worth more than a line about them
            sentence = f"The job goes on, but not all of it can be shown: {fault}"
            if sentence not in self._told:
                self._told.add(sentence)
                with suppress(Exception):
                    self._tell(sentence)
