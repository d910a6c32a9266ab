"""A whole job whose rows lie on a disk: TransferQueue's SimpleStorage with all values offloaded."""

import pytest

from tests.end_to_end.jobs import ACTOR, run_job
from tests.end_to_end.test_padded_jobs import assert_finite_and_agreeing, assert_no_pad_outside_worker_calls

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

OFFLOAD = "+transfer_queue.backend.SimpleStorage.ssd_offload"


def test_a_padded_job_trains_on_rows_that_lie_on_a_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    facts = run_job(
        tmp_path / "job",
        "+padding=prompt",
        "padding.packer=plan",
        f"{OFFLOAD}.enabled=true",
        f"{OFFLOAD}.path={disk}",
        f"{OFFLOAD}.threshold_bytes=1",
        steps=2,
    )
    assert list(disk.iterdir()), "nothing was meant to stay in memory"
    assert_no_pad_outside_worker_calls(facts)
    assert_finite_and_agreeing(facts)
    steps = facts.optimizer_steps[ACTOR]
    assert len(steps) == 2 * 3
    assert all(step.moved and step.real_rows > 0 for step in steps)
    assert sum(step.real_rows for step in steps) == sum(rows.real for rows in facts.rows.values())
    assert sum(step.rows - step.real_rows for step in steps) > 0, "no pad was met"
