"""Rows in the real TransferQueue: set aside and put back as they were, and columns of rows that are
gone. What is cleared at a start is in tests/driver/test_training_steps.py."""

import pytest
import torch
import transfer_queue as tq

from tests.support.deep_equality import assert_equal
from tests.support.rows_in_queue import (
    PARTITION,
    put_rows,
    queue_content,
)
from verl_padding.errors import PaddingDataError
from verl_padding.pads.queue import (
    put_columns,
    read_rows,
    set_aside,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def content_of(batch):
    return [read_rows([key], PARTITION)[0] for key in batch.keys], queue_content()


def save_on_a_full_disk(batches):
    with set_aside(batches):
        assert queue_content() == {}
        raise OSError("disk full")


def test_rows_of_several_local_updates_come_back_even_after_an_error():
    first, second = put_rows([(5, 3), (7, 2)], colour=["red", "blue"]), put_rows([(5, 3), (4, 4)])
    rows, tags = content_of(first)
    with pytest.raises(OSError, match="disk full"):
        save_on_a_full_disk([first, second])
    assert queue_content() == tags
    for got, want in zip(content_of(first)[0], rows, strict=True):
        assert_equal(got, want)
        assert got["colour"] in {"red", "blue"}
    assert "colour" not in content_of(second)[0][0]


def test_columns_of_a_row_that_was_cleared_are_refused_and_make_no_row():
    batch = put_rows([(5, 3), (7, 2)])
    tq.kv_clear(keys=batch.keys[1:], partition_id=PARTITION)
    with pytest.raises(
        PaddingDataError, match=rf"^row '{batch.keys[1]}': not in TransferQueue \(1 of 2 rows"
    ):
        put_columns(batch, {"number": torch.arange(2)})
    assert list(queue_content()) == batch.keys[:1]
