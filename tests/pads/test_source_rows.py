"""Rows that pads cannot be made from, refused before one is put."""

import math

import pytest
import torch

from tests.support.rows_in_queue import (
    put_rows,
    put_some_fields,
    queue_content,
)
from verl_padding import upsample
from verl_padding.errors import PaddingDataError
from verl_padding.pads.source_rows import SourceRows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def test_a_real_row_that_is_tagged_as_padding_is_refused():
    batch = put_rows([(5, 3), (7, 2)])
    batch.tags[1]["is_padding"] = True
    content = queue_content()
    with pytest.raises(PaddingDataError, match=f"row '{batch.keys[1]}': tagged is_padding=True"):
        upsample(batch, 4)
    assert queue_content() == content


@pytest.mark.parametrize(
    "weight", [-1.0, math.nan, math.inf, 1e-39, 1e39, "2", None, [1.0, 2.0], torch.ones(2)], ids=str
)
def test_a_weight_that_is_none_is_refused_with_its_row(weight):
    batch = put_some_fields([(5, 3), (7, 2)], [{"loss_weight": 1.0}, {"loss_weight": weight}])
    with pytest.raises(
        PaddingDataError, match=rf"^row '{batch.keys[1]}': loss_weight=.*: not 0, nor a number"
    ):
        SourceRows(batch).weights()


def test_a_row_that_a_column_alone_marks_as_a_pad_is_refused():
    marks = [{"is_padding": torch.tensor(is_pad)} for is_pad in (False, False, True)]
    for rows in (marks, [{}, *marks[1:]]):
        batch = put_some_fields([(5, 3), (7, 2), (4, 2)], rows)
        content = queue_content()
        with pytest.raises(PaddingDataError, match=f"^row '{batch.keys[2]}': .*is_padding"):
            upsample(batch, 4)
        assert queue_content() == content
