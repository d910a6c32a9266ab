"""Position ids of M-RoPE survive TransferQueue and verl's workers, also where all rows have one length."""

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.rows_in_queue import PARTITION, put_rows
from verl_padding.patches.position_ids import fix_3d_position_ids

LENGTHS = [[5], [2], [4], [5, 5], [2, 2, 2], [4, 4], [8, 8], [16, 16, 16, 16], [5, 8], [4, 8, 4], [12, 4]]


def positions(lengths, axes):
    return [torch.arange(axes * length).reshape(axes, length) for length in lengths]


def packed_by_the_queue(rows):
    batch = put_rows([(1, row.shape[1] - 1) for row in rows], position_ids=rows)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["position_ids"])
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    return data


def rows_of(data):
    return [row.tolist() for row in data["position_ids"].unbind()]


@pytest.mark.ray
@pytest.mark.usefixtures("transfer_queue")
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_position_ids_are_the_rows_that_were_put_however_often_they_are_fixed(lengths, axes):
    rows = positions(lengths, axes)
    data = packed_by_the_queue(rows)
    for _ in range(3):
        fix_3d_position_ids(data)
        assert data["position_ids"]._ragged_idx == 2
        assert rows_of(data) == [row.tolist() for row in rows]
    part = tu.index_select_tensor_dict(data, [len(rows) - 1])
    fix_3d_position_ids(part)
    assert rows_of(part) == [rows[-1].tolist()]
    # As after pickling, which is what verl's own function is for.
    data["position_ids"]._ragged_idx = 1
    fix_3d_position_ids(data)
    assert rows_of(data) == [row.tolist() for row in rows]


def test_ids_of_one_axis_and_rows_without_any_are_left_alone():
    flat = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(3)], layout=torch.jagged)
    data = TensorDict({"position_ids": flat}, batch_size=2)
    fix_3d_position_ids(data)
    assert data["position_ids"] is flat
    fix_3d_position_ids(TensorDict({}, batch_size=2))


@pytest.mark.ray
@pytest.mark.usefixtures("transfer_queue")
def test_verls_own_function_still_takes_such_rows_apart():
    # When this fails, verl packs them right: take the replacement out.
    data = packed_by_the_queue(positions([5, 5], 4))
    tu.maybe_fix_3d_position_ids(data)
    with pytest.raises(RuntimeError):
        data["position_ids"].unbind()
