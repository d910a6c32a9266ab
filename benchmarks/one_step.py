"""A worker group whose calls are all sent the rows of one padded batch, without a trainer."""

from __future__ import annotations

from typing import Any

from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.padded_batch import PaddedBatch


class OneStep:
    """What a :class:`PaddedWorkerGroup` asks for its step."""

    def __init__(self, padded: PaddedBatch):
        self._padded, self.current = padded, self

    def has_planned(self, call: str, batch: Any) -> bool:
        return call in self._padded.plan.layouts and sorted(batch.keys) == sorted(
            self._padded.batch.keys
        )

    def padded_for(self, call: str) -> PaddedBatch:
        return self._padded


def padded_group(worker_group: Any, padded: PaddedBatch) -> PaddedWorkerGroup:
    """The worker group as a step's calls find it."""
    return PaddedWorkerGroup(worker_group, OneStep(padded))
