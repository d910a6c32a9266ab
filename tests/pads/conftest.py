"""What tests of rows in TransferQueue share."""

import pytest

from tests.support import rows_in_queue


@pytest.fixture
def empty_queue(transfer_queue):
    """The session's TransferQueue, emptied after the test."""
    yield transfer_queue
    rows_in_queue.empty_queue()
