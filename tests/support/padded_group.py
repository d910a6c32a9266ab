"""A worker group whose calls are all sent the rows of one padded batch, without a trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl_padding.driver.worker_calls import PaddedWorkerGroup


def padded_group(
    worker_group,
    padded,
    note_work=lambda call, tokens, epochs: None,
):
    """The worker group as an update's calls find it.

    Args:
        note_work: gets each call, the tokens that reached its models, and its epochs.
    """
    update: Any = SimpleNamespace(
        worker_batch=padded.worker_batch,
        plan=padded.plan,
        note_work=note_work,
    )
    return PaddedWorkerGroup(worker_group, lambda call, batch: update)
