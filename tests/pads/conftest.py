"""What tests of rows in TransferQueue share."""

import pytest
import transfer_queue as tq

from tests.support.rows_in_queue import PARTITION, queue_content


@pytest.fixture
def empty_queue(transfer_queue):
    """The session's TransferQueue, emptied after the test."""
    yield transfer_queue
    if left := list(queue_content()):
        tq.kv_clear(keys=left, partition_id=PARTITION)
