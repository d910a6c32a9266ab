"""What the tests of the trainer's process share."""

import pytest
import transfer_queue as tq


@pytest.fixture
def empty_queue(transfer_queue):
    """Leaves no row behind in TransferQueue."""
    yield
    for partition, rows in (tq.kv_list() or {}).items():
        if rows:
            tq.kv_clear(keys=list(rows), partition_id=partition)
