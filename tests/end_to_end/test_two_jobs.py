"""A second real job on the Ray cluster of a first one: it is refused, and the first one's rows are not touched."""

import pytest
import ray

from tests.end_to_end.jobs import run_job
from tests.support.rows_in_queue import put_rows, queue_content
from verl_padding.pads.queue import clear, controller

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


def test_a_second_job_on_a_cluster_whose_transfer_queue_is_in_use_is_refused_before_a_worker_starts(tmp_path):
    batch = put_rows([(5, 3), (7, 2), (4, 9)])  # this process is the first job
    content = queue_content()
    try:
        second = run_job(
            tmp_path,
            "+padding=prompt",
            f"+ray_kwargs.ray_init.address={ray.get_runtime_context().gcs_address}",
            "ray_kwargs.ray_init.num_cpus=null",
            "ray_kwargs.ray_init.num_gpus=null",
            "ray_kwargs.ray_init.object_store_memory=null",
            steps=1,
            fails=True,
        )
        assert "PaddingConfigError: The TransferQueue of this Ray cluster belongs to another job" in second.log
        assert "WorkerDict" not in second.log, "a worker was started"
        assert queue_content() == content
        assert ray.get(controller().__ray_ready__.remote())
    finally:
        clear(batch.keys, batch.partition_id)
