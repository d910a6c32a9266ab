"""Position ids of M-RoPE are those of the rows, whatever their lengths."""

import pickle
from collections import Counter
from itertools import chain, combinations_with_replacement

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.rows_in_queue import PARTITION, put_rows
from verl_padding.verl_fixes.position_ids import fix_3d_position_ids

MAX_ROWS = 4
AXES = (3, 4)
LENGTHS = [
    *chain.from_iterable(
        combinations_with_replacement(range(1, 5), n) for n in range(1, MAX_ROWS + 1)
    ),
    *((length,) * n for length in (6, 8, 9, 12, 16) for n in range(1, MAX_ROWS + 1)),
    *((5, 8), (4, 8, 4), (12, 4), (8, 3, 1)),
]
"""All short lengths of a few rows, and longer ones that are as many as the axes of all rows
together."""


def fits_both_layouts(lengths, axes):
    """Whether the sizes are those of rows below one another, of ``axes`` each, and of rows beside
    one another."""
    same = len(set(lengths)) == 1
    return len(lengths) > 1 and same and (sum(lengths) == axes or lengths[0] == len(lengths) * axes)


def positions(length, axes):
    return torch.arange(axes * length).reshape(axes, length)


def packed_by_the_queue(keys):
    return tq.kv_batch_get(
        keys=keys, partition_id=PARTITION, select_fields=["position_ids", "input_ids"]
    )


def rows_of(data):
    return [row.tolist() for row in data["position_ids"].unbind()]


def sent(data):
    """As verl sends a call's data to a rank (protocol.py); tensordict then forgets which dimension
    is ragged."""
    return pickle.loads(pickle.dumps(data.contiguous().consolidate()))


@pytest.fixture(params=AXES)
def rows_in_queue(request, transfer_queue):
    """Axes of position ids, and the key of the n-th row of each length."""
    which = [
        (length, n) for length in sorted(set(chain.from_iterable(LENGTHS))) for n in range(MAX_ROWS)
    ]
    batch = put_rows(
        [(1, length - 1) for length, _ in which],
        position_ids=[positions(length, request.param) + 1000 * n for length, n in which],
    )
    yield request.param, dict(zip(which, batch.keys, strict=True))
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)


@pytest.mark.ray
def test_position_ids_are_those_put_however_often_they_are_fixed(rows_in_queue):
    axes, key_of = rows_in_queue
    assert sum(fits_both_layouts(lengths, axes) for lengths in LENGTHS) >= 4
    for lengths in LENGTHS:
        seen: Counter[int] = Counter()
        keys, want = [], []
        for length in lengths:
            keys.append(key_of[length, seen[length]])
            want.append((positions(length, axes) + 1000 * seen[length]).tolist())
            seen[length] += 1
        data = packed_by_the_queue(keys)
        for _ in range(3):
            fix_3d_position_ids(data)
            assert data["position_ids"]._ragged_idx == 2
            assert rows_of(data) == want
            backwards = list(range(len(keys)))[::-1]
            part = tu.index_select_tensor_dict(data, backwards)
            fix_3d_position_ids(part)
            assert rows_of(part) == want[::-1]
            last = tu.index_select_tensor_dict(part, [0])
            fix_3d_position_ids(last)
            assert rows_of(last) == want[-1:]
            data = sent(data)


def test_ids_of_one_axis_and_rows_without_any_are_left_alone():
    flat = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(3)], layout=torch.jagged)
    data = TensorDict({"position_ids": flat}, batch_size=2)
    fix_3d_position_ids(data)
    assert data["position_ids"] is flat
    fix_3d_position_ids(TensorDict({}, batch_size=2))


@pytest.mark.ray
def test_verls_own_function_still_takes_such_rows_apart(rows_in_queue):
    # When this fails, verl packs them right: take the replacement out.
    _, key_of = rows_in_queue
    data = packed_by_the_queue([key_of[5, 0], key_of[5, 1]])
    tu.maybe_fix_3d_position_ids(data)
    with pytest.raises(RuntimeError):
        data["position_ids"].unbind()
