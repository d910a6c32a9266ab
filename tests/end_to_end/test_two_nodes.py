"""A job on a Ray cluster of two nodes, four ranks on each, that was there before the job."""

import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from ray.cluster_utils import Cluster

from tests.end_to_end.test_padded_jobs import assert_finite_and_agreeing
from tests.support import probe
from tests.support.jobs import ACTOR, PROBE, ROOT, run_job
from verl_padding.on_cpu.launch import job_environment

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

RANKS = 8


@pytest.fixture
def cluster(tmp_path):
    """Two nodes of this machine, of four GPU tickets each.

    Workers have the environment of their node: the probe is named there, and the plug-in is not.
    """
    with tempfile.TemporaryDirectory(
        prefix="vp", dir="/tmp", ignore_cleanup_errors=True
    ) as scratch:
        (
            Path(scratch) / "ray"
        ).mkdir()  # Cluster writes its address there, and does not make the folder
        environment = job_environment(Path(scratch), tmp_path) | {
            "PYTHONPATH": str(ROOT),
            "VERL_USE_EXTERNAL_MODULES": probe.__name__,
            probe.FOLDER: str(tmp_path / PROBE),
        }
        with mock.patch.dict(os.environ, environment):
            node = {"num_cpus": 32, "num_gpus": RANKS // 2, "object_store_memory": 200_000_000}
            cluster = Cluster(
                initialize_head=True,
                head_node_args=node | {"temp_dir": scratch, "include_dashboard": False},
            )
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


def test_eight_ranks_of_two_nodes_train_on_real_rows_alone(cluster, tmp_path):
    facts = run_job(
        tmp_path,
        "+padding=prompt",
        "padding.packer=plan",
        "trainer.nnodes=2",
        f"trainer.n_gpus_per_node={RANKS // 2}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"+ray_kwargs.ray_init.address={cluster.address}",
        "ray_kwargs.ray_init.num_cpus=null",
        "ray_kwargs.ray_init.num_gpus=null",
        "ray_kwargs.ray_init.object_store_memory=null",
        steps=2,
    )
    steps = facts.optimizer_steps[ACTOR]
    assert len(steps) == 2 * 6 // 2
    assert all(len(step.nodes) == RANKS and len(set(step.nodes)) == 2 for step in steps), (
        "not as many on two nodes"
    )
    assert all(step.moved and step.rows % RANKS == 0 for step in steps)
    assert any(step.real_rows % RANKS for step in steps), "no mini-batch was awkward"
    assert_finite_and_agreeing(facts)
    for step, metrics in facts.metrics.items():
        # Where the plug-in is not loaded, a worker has verl's packer and loss, and tells of
        # neither.
        assert metrics["padding/actor/micro_batches"] >= 1
        assert metrics["padding/real_rows/total"] == facts.rows[step].real
    assert sum(step.real_rows for step in steps) == sum(rows.real for rows in facts.rows.values())
    assert sum(step.rows - step.real_rows for step in steps) > 0, "no pad was met"
    assert all(note["pads"] == 0 for note in facts.batches + facts.queue)
