"""The plan's micro-batches in place of verl's packer."""

import sys
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import prepare_micro_batches

from verl_padding.errors import PaddingDataError
from verl_padding.pads.planned_call import BATCH_ROW, CALL, PlannedCall
from verl_padding.plan import Layout
from verl_padding.worker.plan_packer import follow_plan, micro_batches_of_plan

LENGTHS = [9, 4, 7, 2, 2, 6]
LAYOUT = Layout(
    n_rows=11,
    rows_MDK=(
        (((6,), (7,)), ((8,), (9,))),
        (((0, 1), (2, 3, 4), (5,)), ((10, 11), (12, 13, 14), (15,))),
    ),
    cut_by="tokens",
)
"""The rows below are those of rank 0 in mini-batch 1."""


def local_batch(*, budget=16, dynamic=True, rows=range(6), planned=True):
    texts = [torch.arange(length) + 100 * row for row, length in enumerate(LENGTHS)]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(texts, layout=torch.jagged),
            BATCH_ROW: torch.tensor(rows),
        },
        batch_size=len(texts),
    )
    sizes = {"max_token_len_per_gpu": budget, "micro_batch_size_per_gpu": 2, "sp_size": 1}
    tu.assign_non_tensor(data, use_dynamic_bsz=dynamic, **sizes)
    if planned:
        layout = replace(LAYOUT, cut_by="tokens" if dynamic else "rows")
        tu.assign_non_tensor_data(data, CALL, PlannedCall(layout=layout))
    return data


def rows_of(micro_batches):
    return [
        [int(row[0]) // 100 for row in micro_batch["input_ids"].unbind()]
        for micro_batch in micro_batches
    ]


def test_the_micro_batches_are_those_of_the_plan_without_any_collective(monkeypatch):
    for name in ("all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: pytest.fail("a collective"))
    micro_batches, indices = follow_plan(prepare_micro_batches)(
        local_batch(), dp_group=object(), same_micro_num_in_dp=True
    )
    assert rows_of(micro_batches) == [[0, 1], [2, 3, 4], [5]]
    assert indices == [[0, 1], [2, 3, 4], [5]]
    assert tu.get_non_tensor_data(micro_batches[0], "use_dynamic_bsz", None) is True


def test_rows_that_no_plan_has_cut_go_to_verls_packer():
    for data in (local_batch(planned=False, budget=30), local_batch(dynamic=False)):
        want, want_indices = prepare_micro_batches(data)
        got, indices = follow_plan(prepare_micro_batches)(data)
        assert rows_of(got) == rows_of(want)
        assert indices == want_indices


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (local_batch(budget=12), r"micro-batch of 13 tokens, more than its budget of 12"),
        (local_batch(rows=[0, 1, 2, 4, 3, 5]), r"not those of the plan"),
        (local_batch(rows=[0, 1, 2, 3, 4, 10]), r"not those of the plan"),
    ],
)
def test_rows_that_are_not_as_planned_are_refused(data, message):
    with pytest.raises(PaddingDataError, match=message):
        follow_plan(prepare_micro_batches)(data)


def test_the_name_in_the_engines_module_is_replaced_while_a_call_runs():
    module, seen = sys.modules[FSDPEngine.__module__], []

    def fail():
        with micro_batches_of_plan(FSDPEngine):
            seen.append(module.prepare_micro_batches)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen[0].__wrapped__ is module.prepare_micro_batches is prepare_micro_batches
