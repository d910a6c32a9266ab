"""Patch of verl's replay buffer (verl 0.9): look for finished prompts more often than every two seconds."""

from types import ModuleType
from typing import Any

import wrapt

POLL_INTERVAL_S = 0.1


def poll_often(replay_buffer: ModuleType) -> None:
    """Caps ``poll_interval`` of every replay buffer.

    The trainer never passes one, and the default of 2 s is most of a step on a toy model. Only the waiting
    changes, not what is sampled.
    """

    def with_cap(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        instance.poll_interval = min(instance.poll_interval, POLL_INTERVAL_S)

    wrapt.wrap_function_wrapper(replay_buffer, "ReplayBuffer.__init__", with_cap)
