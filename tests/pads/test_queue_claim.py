"""A TransferQueue has one trainer at a time: a second one is refused, and touches no row of the first one."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import ray
import transfer_queue as tq

from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from verl_padding.errors import PaddingConfigError
from verl_padding.pads import queue, queue_claim
from verl_padding.pads.queue import controller, tags_of
from verl_padding.pads.queue_claim import claim_queue, release_queue

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue", "unclaimed_queue")]

ROOT = Path(__file__).parent.parent.parent
# What verl's runner does around a trainer, in a driver of its own: it closes the queue whatever happens.
SECOND_JOB = """
import sys
import benchmarks.ray_and_queue
import ray
import transfer_queue as tq
from verl.trainer.ppo.v1 import get_trainer_cls
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.errors import PaddingConfigError

get_trainer_cls("sync")._setup = lambda self: print("workers were started")
ray.init(address=sys.argv[1], log_to_driver=False)
for place in ("constructor", "setup"):
    tq.init()
    try:
        trainer = padded_trainer()
        if place == "constructor":
            type(trainer).__init__(trainer, None)
        else:
            trainer._setup()
    except PaddingConfigError as refusal:
        print(f"{place}: {refusal}", flush=True)
    finally:
        tq.close()
"""


def _forget_claim(queue) -> None:
    if hasattr(queue, queue_claim._ATTRIBUTE):
        delattr(queue, queue_claim._ATTRIBUTE)


@pytest.fixture
def unclaimed_queue():
    """The session's queue as its maker had it: nobody has claimed it, and it is empty."""
    ray.get(controller().__ray_call__.remote(_forget_claim))
    yield
    for partition_id in queue_claim.PARTITIONS:
        if keys := list(tags_of(partition_id)):
            tq.kv_clear(keys=keys, partition_id=partition_id)
    ray.get(controller().__ray_call__.remote(_forget_claim))


@ray.remote(num_cpus=1)
class TrainerProcess:
    """A process of this job that trainers run in."""

    def claim(self) -> str:
        tq.init()
        try:
            claim_queue()
        except PaddingConfigError as refusal:
            tq.close()  # as verl's runner does
            return str(refusal)
        return "claimed"

    def release(self) -> None:
        release_queue()


def put_batch() -> None:
    """Rows and prompts that a trainer has in flight: some sampled already, and a pad."""
    uid, pad = uuid4().hex, f"pad{uuid4().hex}"
    put_rows([(5, 3), (7, 2)], keys=[f"{uid}_0_0", f"{uuid4().hex}_0_0"])
    tq.kv_put(key=uid, partition_id=PARTITION, tag={"is_prompt": True, "status": "running", "global_steps": 1})
    pads = put_rows([(1, 1)], keys=[f"{pad}_0_0"])
    tq.kv_batch_put(keys=pads.keys, partition_id=PARTITION, tags=[{**pads.tags[0], "is_padding": True}])


def test_a_second_job_on_the_cluster_is_refused():
    put_batch()
    content = queue_content()
    command = [sys.executable, "-c", SECOND_JOB, ray.get_runtime_context().gcs_address]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    second = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    owner = rf"belongs to another job, {ray.get_runtime_context().get_job_id()} \(pid {os.getpid()} on "
    for place in ("constructor", "setup"):
        assert re.search(f"^{place}: The TransferQueue of this Ray cluster {owner}", second.stdout, re.MULTILINE)
    assert "workers were started" not in second.stdout
    assert queue_content() == content, "the first job's queue is as it was"


@pytest.fixture(scope="module")
def other(transfer_queue):
    """A process that takes no claim along from one test to the next: the queue's controller has them."""
    process = TrainerProcess.remote()
    yield process
    ray.kill(process)


def test_two_trainers_of_one_job_do_not_share_a_queue(other, caplog):
    claim_queue()
    put_batch()
    tq.kv_put(key=uuid4().hex, partition_id="val", tag={"is_prompt": True, "status": "running", "global_steps": 1})
    content = queue_content()
    assert f"is in use by another trainer, pid {os.getpid()} on " in ray.get(other.claim.remote())
    assert queue_content() == content

    release_queue()
    assert ray.get(other.claim.remote()) == "claimed"
    assert queue_content() == {}
    assert tags_of("val") == {}

    put_rows([(5, 3)])
    ray.get(other.release.remote())
    with caplog.at_level(logging.WARNING):
        claim_queue()
    assert queue_content() == {}
    [message] = [record.getMessage() for record in caplog.records if record.name == queue.logger.name]
    assert "cleared 1 key that an earlier trainer left in TransferQueue's partition 'train'" in message


def test_what_a_killed_trainer_left_is_cleared():
    killed = TrainerProcess.remote()
    assert ray.get(killed.claim.remote()) == "claimed"
    put_batch()
    ray.kill(killed)
    claim_queue()
    assert queue_content() == {}


def test_rows_in_a_queue_of_nobody_known_are_not_touched_but_refused(other):
    put_batch()
    content = queue_content()
    assert "of a trainer that may use them" in ray.get(other.claim.remote())
    assert queue_content() == content

    tq.kv_clear(keys=list(content), partition_id=PARTITION)
    assert ray.get(other.claim.remote()) == "claimed", "an empty queue is taken"


def test_the_maker_of_a_queue_keeps_what_it_has_put_there():
    put_batch()
    content = queue_content()
    claim_queue()
    assert queue_content() == content
    release_queue()
