"""Copies of what one process of a job hands to another."""

import pickle
from typing import Any

from ray import cloudpickle


def by_value(value: Any) -> Any:
    """A copy, as Ray hands it to another process: in a job, rewards, loops and the queue each have their own.

    What cannot be pickled is an error here too, lazily opened images are read once, and arrays are read-only.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return cloudpickle.loads(pickled, buffers=[bytes(buffer) for buffer in buffers])
