"""A worker group whose calls are all sent the rows of one padded batch, without a trainer."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.padded_batch import PaddedBatch


def padded_group(worker_group: Any, padded: PaddedBatch) -> PaddedWorkerGroup:
    """The worker group as a step's calls find it."""
    step: Any = SimpleNamespace(padded_for=lambda call: padded)
    return PaddedWorkerGroup(worker_group, lambda call, batch: nullcontext(step))
