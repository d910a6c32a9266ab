"""Lets one trainer at a time use a TransferQueue: that trainer says so in the queue's controller.

A Ray cluster has one TransferQueue, whose controller is an actor of a fixed name, and verl's trainers all use its
partitions ``train`` and ``val``. A second trainer there would sample, overwrite and clear the rows of the first one.
So a padded trainer claims the queue before it looks at it; what it then finds there no longer belongs to anyone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import ray
import ray._private.state

from verl_padding.errors import PaddingConfigError
from verl_padding.pads.queue import clear_with_a_warning, controller, detach, is_connected, tags_of

PARTITIONS = ("train", "val")
"""verl's names for the parts of TransferQueue that its trainers use."""

ENDED = "ended"
"""In the place of a claim whose trainer has ended: what it left belongs to nobody."""

_ATTRIBUTE = "verl_padding_claim"
_OWN_CLUSTER = (
    "Two trainers would train, and clear, each other's rows: verl has one queue per Ray cluster. This job has touched "
    "nothing. Give it a Ray cluster of its own (RAY_ADDRESS=local or +ray_kwargs.ray_init.address=local, or the "
    "address of another cluster)"
)


def check_queue_owner() -> None:
    """Refuses a TransferQueue that another Ray job has made, and lets go of it without touching its content.

    verl's runner connects to the queue before it makes a trainer, and closes it when the trainer raises, which would
    end the other job's controller.

    Raises:
        PaddingConfigError: the queue belongs to another job.
    """
    if not is_connected():
        return
    owner = controller()._actor_id.job_id.hex()
    if owner != ray.get_runtime_context().get_job_id():
        detach()
        raise PaddingConfigError(
            f"The TransferQueue of this Ray cluster belongs to another job, {_describe_job(owner)}. {_OWN_CLUSTER}, or "
            "wait until the other job has ended; Ray takes a few seconds to end one that has just been killed."
        )


def claim_queue() -> None:
    """Claims the TransferQueue for the trainer of this process, and clears what an earlier one left in it.

    Call it before a snapshot is loaded. Prompts and rows of a trainer that has ended come again, from the snapshot or
    from the data; if they stayed, this trainer would train on them as if they were its own, or wait for them.

    Raises:
        PaddingConfigError: another trainer has the queue. Nothing was touched.
    """
    check_queue_owner()
    mine = _claim_of_this_process()
    found = ray.get(controller().__ray_call__.remote(_claim_unless_in_use, mine))
    if found not in (None, ENDED, mine):
        detach()
        raise PaddingConfigError(
            f"The TransferQueue of this Ray cluster is in use by another trainer, {found}. {_OWN_CLUSTER}, or start it "
            "when the other trainer has ended; if it was killed, close the queue first (close() of transfer_queue)."
        )
    if found is not None:
        for partition_id in PARTITIONS:
            clear_with_a_warning(list(tags_of(partition_id)), partition_id, "prompts and rows")


def release_queue() -> None:
    """Says that this process's trainer has ended; does nothing if it has no queue, or none any more."""
    with suppress(ValueError, ray.exceptions.RayActorError):  # the queue may have ended before its trainer
        ray.get(controller().__ray_call__.remote(_end_claim, _claim_of_this_process()))


def _claim_of_this_process() -> str:
    return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"


# These run in the controller, which handles one call at a time: of two trainers that start at once, one gets the queue.
def _claim_of(queue: Any) -> str | None:
    return getattr(queue, _ATTRIBUTE, None)


def _claim_unless_in_use(queue: Any, mine: str) -> str | None:
    found = _claim_of(queue)
    if found in (None, ENDED, mine):
        setattr(queue, _ATTRIBUTE, mine)
    return found


def _end_claim(queue: Any, mine: str) -> None:
    if _claim_of(queue) == mine:
        setattr(queue, _ATTRIBUTE, ENDED)


def _describe_job(job: str) -> str:
    for entry in ray._private.state.state.job_table():
        if entry["JobID"] == job:
            return f"{job} (pid {entry['DriverPid']} on {entry['DriverIPAddress']}: {entry['Entrypoint']})"
    return job
