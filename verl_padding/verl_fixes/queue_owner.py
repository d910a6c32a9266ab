"""Refuses the TransferQueue of another Ray job: two trainers would train, and clear, each other's
rows.

A Ray cluster has one TransferQueue, and all of verl's trainers use its partitions ``train`` and
``val``.
"""

import ray

from verl_padding.errors import PaddingConfigError
from verl_padding.pads import queue


def check_queue_owner() -> None:
    """Refuses a TransferQueue that another Ray job has made, and leaves it as it is.

    To be called before anything else can raise: verl's runner connects to the queue before it makes
    a trainer, and closes it when the trainer raises, which ends the controller, also that of
    another job.

    Raises:
        PaddingConfigError: with the other job's id, and the settings that give this one a cluster
            of its own.
    """
    if not queue.is_connected():
        return
    owner = queue.controller()._actor_id.job_id.hex()
    if owner == ray.get_runtime_context().get_job_id():
        return
    queue.detach()
    raise PaddingConfigError(
        f"RAY_ADDRESS: the TransferQueue of this Ray cluster belongs to another job, {owner}. Give "
        "this one a cluster of its own (RAY_ADDRESS=local or "
        "+ray_kwargs.ray_init.address=local), or wait until the other has ended."
    )
