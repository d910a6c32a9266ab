"""Our columns, as TransferQueue's storages hand them out that read by the shapes in its books (Mooncake)."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage.managers.base import KVStorageManager
from transfer_queue.utils.tensor_utils import allocate_empty_tensors
from verl.utils import tensordict_utils as tu

from verl_padding.pads.columns import COLUMN_DTYPES, IS_PADDING, LOSS_FACTOR, MICRO_BATCH, WEIGHS_ROWS, read_column
from verl_padding.pads.real_rows import real_rows
from verl_padding.worker.losses import RealRowsLoss
from verl_padding.worker.plan_packer import follow_plan

IDS = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 2, 4, 2)], layout=torch.jagged)
VALUES = {
    "is_padding": [False, True, False, True],
    "mini_batch_real_rows": [2] * 4,
    "mini_batch_reporting_ranks": [1] * 4,
    "loss_factor": [0.5, 0.0, 1.5, 0.0],
    "micro_batch": [0, 0, 1, 1],
    "chain": [0, -1, 2, -1],
    "batch_row": [0, -1, 2, -1],
    "mini_batch_loss_tokens": [5] * 4,
    "mini_batch_trained_rows": [2] * 4,
}


def data_of_rows():
    columns = {name: torch.tensor(VALUES[name], dtype=dtype) for name, dtype in COLUMN_DTYPES.items()}
    masks = {name: torch.ones_like(IDS) for name in ("loss_mask", "response_mask")}
    return TensorDict({"input_ids": IDS, **masks, **columns}, batch_size=4)


def read_by_shape(data):
    """Through TransferQueue's own functions: rows to bytes, and bytes to tensors of the shapes that it has noted."""
    schema, n_rows = extract_field_schema(data), len(data)
    fields = sorted(schema)
    shapes = [
        shape for name in fields for shape in schema[name].get("per_sample_shapes") or [schema[name]["shape"]] * 4
    ]
    dtypes = [schema[name]["dtype"] for name in fields for _ in range(n_rows)]
    tensors, *_ = allocate_empty_tensors(dtypes, shapes)
    for tensor, value in zip(tensors, KVStorageManager._generate_values(data), strict=True):
        assert tensor.nbytes == value.nbytes
        tensor.view(-1).view(torch.uint8).copy_(value.contiguous().view(-1).view(torch.uint8))
    manager = SimpleNamespace(_get_executor=lambda: None)
    meta = SimpleNamespace(global_indexes=list(range(n_rows)), field_names=fields)
    return KVStorageManager._merge_tensors_to_tensordict(manager, meta, tensors)


@pytest.fixture(params=[data_of_rows, lambda: read_by_shape(data_of_rows())], ids=["as put", "by shape"])
def data(request):
    return request.param()


def test_columns_come_back_as_jagged_rows_of_one_from_such_a_storage():
    assert all(read_by_shape(data_of_rows())[name].is_nested for name in COLUMN_DTYPES)


def test_each_column_is_read_as_it_was_put(data):
    for name, dtype in COLUMN_DTYPES.items():
        column = read_column(data, name)
        assert column.dtype == dtype
        assert column.tolist() == VALUES[name]


def test_real_rows_are_those_without_pads(data):
    assert [ids.tolist() for ids in real_rows(data)["input_ids"].unbind()] == [[0, 1, 2], [0, 1, 2, 3]]


def test_the_loss_sees_the_real_rows_and_their_denominators(data):
    seen = []

    def inner(model_output, data, dp_group):
        seen.append((model_output["log_probs"].tolist(), int(data["global_batch_size"])))
        return model_output["log_probs"].sum(), {"actor/loss": 1.0}

    tu.assign_non_tensor(data, batch_num_tokens=7, dp_size=1, global_batch_size=9, **{WEIGHS_ROWS: True})
    output = {"log_probs": torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)}
    loss, metrics = RealRowsLoss(inner, "rows")(model_output=output, data=data, dp_group=None)
    assert float(loss) == 5.0
    assert seen == [([1.0, 4.0], 2)]
    loss.backward()
    assert output["log_probs"].grad.tolist() == [VALUES[LOSS_FACTOR][0], 0.0, VALUES[LOSS_FACTOR][2], 0.0]
    assert "actor/loss" in metrics


def test_a_micro_batch_of_pads_alone_gives_a_zero_that_hangs_on_the_model(data):
    pads = tu.index_select_tensor_dict(data, [1, 3])
    output = {"log_probs": torch.tensor([2.0, 8.0], requires_grad=True)}
    loss, _ = RealRowsLoss(lambda **_: pytest.fail("a pad reached the loss"), "rows")(output, pads)
    assert (float(loss), loss.requires_grad) == (0.0, True)


def test_the_plans_micro_batches_are_followed(data):
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=8, sp_size=1)
    parts, indices = follow_plan(lambda *_, **__: pytest.fail("verl's packer was asked"))(data)
    assert indices == [[0, 1], [2, 3]]
    assert [read_column(part, MICRO_BATCH).tolist() for part in parts] == [[0, 0], [1, 1]]
    assert [read_column(part, IS_PADDING).tolist() for part in parts] == [[False, True]] * 2
