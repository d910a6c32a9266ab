"""The helper for code that may get a pad: the same kind of thing, without pads."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto

from verl_padding.errors import PaddingDataError
from verl_padding.pads.upsampling import real_rows

IS_PAD = [False, True, False, True, True, False]
REAL = [row for row, is_pad in enumerate(IS_PAD) if not is_pad]
TAGS = [{"seq_len": row} | ({"is_padding": True} if is_pad else {}) for row, is_pad in enumerate(IS_PAD)]


def worker_data(is_padding):
    rows = [torch.arange(1 + row) for row in range(len(IS_PAD))]
    fields = {
        "row": torch.arange(len(IS_PAD)),
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "name": NonTensorStack(*[f"row {row}" for row in range(len(IS_PAD))]),
    }
    if is_padding is not None:
        fields["is_padding"] = is_padding
    return TensorDict(fields, batch_size=len(IS_PAD))


def test_a_batch_of_keys_keeps_its_real_ones_with_their_tags():
    batch = KVBatchMeta(keys=[f"p_{row}_0" for row in range(6)], tags=TAGS, partition_id="train", fields=["ids"])
    kept = real_rows(batch)
    assert kept.keys == [f"p_{row}_0" for row in REAL]
    assert [tag["seq_len"] for tag in kept.tags] == REAL
    assert (kept.partition_id, kept.fields) == ("train", ["ids"])


@pytest.mark.parametrize("kind", [list, tuple])
def test_tags_are_filtered_as_a_list(kind):
    assert [tag["seq_len"] for tag in real_rows(kind(TAGS))] == REAL


@pytest.mark.parametrize(
    "is_padding",
    [torch.tensor(IS_PAD), torch.tensor(IS_PAD)[:, None], NonTensorStack(*IS_PAD)],
    ids=["column", "column of one", "no tensor"],
)
def test_worker_data_keeps_rows_of_every_kind_of_field(is_padding):
    kept = real_rows(worker_data(is_padding))
    assert kept["row"].tolist() == REAL
    assert [len(ids) for ids in kept["ids"].unbind()] == [1 + row for row in REAL]
    assert list(kept["name"]) == [f"row {row}" for row in REAL]


def test_a_data_proto_is_filtered_wherever_its_column_is():
    batch = TensorDict({"row": torch.arange(6), "is_padding": torch.tensor(IS_PAD)}, batch_size=6)
    kept = real_rows(DataProto(batch=batch, non_tensor_batch={"uid": np.array(list("abcdef"), dtype=object)}))
    assert kept.batch["row"].tolist() == REAL
    assert kept.non_tensor_batch["uid"].tolist() == ["a", "c", "f"]
    arrays = {"uid": np.array(list("ab"), dtype=object), "is_padding": np.array([True, False])}
    assert real_rows(DataProto(non_tensor_batch=arrays)).non_tensor_batch["uid"].tolist() == ["b"]


def test_worker_data_of_pads_alone_is_told_by_name():
    with pytest.raises(PaddingDataError, match="6 rows, and only pads"):
        real_rows(worker_data(torch.ones(6, dtype=torch.bool)))
