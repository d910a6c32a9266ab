"""A second job on a Ray cluster is refused, and touches no row of the first one."""

from uuid import uuid4

import pytest
import ray
import transfer_queue as tq

from tests.support.fresh_processes import run_fresh
from tests.support.pages import ROOT
from tests.support.rows_in_queue import PARTITION, put_rows, queue_content

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue", "empty_queue")]

# If verl had a queue for each job, the second one would get further, and the check could go. This
# is what verl's runner does around a trainer, in a driver of its own: it closes the queue whatever
# happens. The config is wrong, so that only a check before all others comes to its message.
SECOND_JOB = """
import sys
import benchmarks.ray_and_queue
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl_padding.driver.trainers import PaddedTrainerSync
from verl_padding.errors import PaddingConfigError

ray.init(address=sys.argv[1], log_to_driver=False)
tq.init()
try:
    PaddedTrainerSync(OmegaConf.create(sys.argv[2]))
except PaddingConfigError as refusal:
    print(refusal, flush=True)
finally:
    tq.close()
"""


def test_a_second_job_is_refused_and_the_first_ones_queue_lives_on():
    uid = uuid4().hex
    put_rows([(5, 3), (7, 2)], keys=[f"{uid}_0_0", f"{uuid4().hex}_0_0"])
    tags = {"is_prompt": True, "status": "running", "global_steps": 1}
    tq.kv_put(key=uid, partition_id=PARTITION, tag=tags)
    content = queue_content()
    address = ray.get_runtime_context().gcs_address
    second = run_fresh(SECOND_JOB, address, "paddng: fast", platform="cpu", folder=ROOT)
    assert second.returncode == 0, second.stderr
    assert f"another job, {ray.get_runtime_context().get_job_id()}." in second.stdout
    assert queue_content() == content, "the first job's queue is as it was"
