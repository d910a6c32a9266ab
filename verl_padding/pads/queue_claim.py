"""Lets one trainer at a time use a TransferQueue: that trainer says so in the queue's controller.

A Ray cluster has one TransferQueue, and verl's trainers all use its partitions ``train`` and ``val``. A second trainer
there would sample, overwrite and clear the rows of the first one. So a padded trainer claims the queue before it looks
at it; what it then finds there no longer belongs to anyone.
"""

import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

import ray
import ray._private.state
from ray.core.generated.gcs_pb2 import WorkerTableData

from verl_padding.errors import PaddingConfigError
from verl_padding.pads import queue
from verl_padding.pads.queue import controller, detach, tags_of

PARTITIONS = ("train", "val")
"""verl's names for the parts of TransferQueue that its trainers use."""
NOTICE_S = 5.0
"""Seconds within which Ray's tables show that a process was killed."""
_ATTRIBUTE = "verl_padding_claim"
_OWN_CLUSTER = (
    "Two trainers would train, and clear, each other's rows: verl has one queue per Ray cluster. This job has touched "
    "nothing. Give it a Ray cluster of its own (RAY_ADDRESS=local or +ray_kwargs.ray_init.address=local, or the "
    "address of another cluster)"
)


class Claim(NamedTuple):
    """A trainer's statement that it uses a TransferQueue: Ray's id of its process, hexadecimal, and where that runs."""

    worker: str
    place: str


ENDED = Claim("", "ended")
"""In the place of a claim whose trainer has ended: what it left belongs to nobody."""


def check_queue_owner() -> None:
    """Refuses a TransferQueue that another Ray job has made, with a PaddingConfigError, and lets go of it as it is.

    verl's runner connects to the queue before it makes a trainer, and closes it when the trainer raises, which would
    end the other job's controller.
    """
    if not queue.is_connected():
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
    from the data; if they stayed, this trainer would train on them as if they were its own, or wait for them. If
    another trainer has the queue, or rows that it may own lie there, a PaddingConfigError refuses it untouched.
    """
    check_queue_owner()
    mine = _claim_of_this_process()
    free = [None, ENDED, mine]
    found = ray.get(controller().__ray_call__.remote(_claim_of))
    if found is None and not queue.was_made_here() and (keys := [key for part in PARTITIONS for key in tags_of(part)]):
        detach()
        raise PaddingConfigError(
            "The TransferQueue of this job was made by another of its processes and holds rows "
            f"({queue.first_few(keys)}) of a trainer that may use them: only a padded one says when it has ended. "
            "Clear them if nobody does, or give this trainer a Ray cluster of its own."
        )
    while (found := ray.get(controller().__ray_call__.remote(_claim_if_found, free, mine))) not in free:
        if _lives_on(found):
            detach()
            raise PaddingConfigError(
                f"The TransferQueue of this Ray cluster is in use by another trainer, {found.place}. {_OWN_CLUSTER}, "
                "or start it when the other trainer has ended."
            )
        free.append(found)
    if found is not None:
        for partition_id in PARTITIONS:
            queue.clear_with_a_warning(list(tags_of(partition_id)), partition_id, "prompts and rows")


def release_queue() -> None:
    """Says that this process's trainer has ended; does nothing if it has no queue, or none any more."""
    with suppress(ValueError, ray.exceptions.RayActorError):  # the queue may have ended before its trainer
        ray.get(controller().__ray_call__.remote(_end_claim, _claim_of_this_process()))


def _claim_of_this_process() -> Claim:
    place = f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"
    return Claim(ray.get_runtime_context().get_worker_id(), place)


# These run in the controller, which handles one call at a time: of two trainers that start at once, one gets the queue.
def _claim_of(actor: Any) -> Claim | None:
    return getattr(actor, _ATTRIBUTE, None)


def _claim_if_found(actor: Any, expected: list[Claim | None], mine: Claim) -> Claim | None:
    found = _claim_of(actor)
    if found in expected:
        setattr(actor, _ATTRIBUTE, mine)
    return found


def _end_claim(actor: Any, mine: Claim) -> None:
    if _claim_of(actor) == mine:
        setattr(actor, _ATTRIBUTE, ENDED)


def _lives_on(claim: Claim) -> bool:
    """Whether the process of a claim is still alive after the time that Ray takes to notice a death."""
    # By Ray's tables: its state API would need a dashboard.
    tables = ray._private.state.state._connect_and_get_accessor()
    deadline = time.monotonic() + NOTICE_S
    while time.monotonic() < deadline:
        data = tables.get_worker_info(ray.WorkerID(bytes.fromhex(claim.worker)))
        if data is None or not WorkerTableData.FromString(data).is_alive:
            return False
        time.sleep(0.2)
    return True


def _describe_job(job: str) -> str:
    for entry in ray._private.state.state.job_table():
        if entry["JobID"] == job:
            return f"{job} (pid {entry['DriverPid']} on {entry['DriverIPAddress']}: {entry['Entrypoint']})"
    return job
