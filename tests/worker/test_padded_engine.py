"""What verl's registry and workers do with the engines of padded jobs."""

from collections import deque
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.fresh_processes import run_fresh
from tests.support.plan_oracles import layout_of_local_batches
from tests.support.ranks_in_process import Rank
from verl_padding.errors import PaddingDataError
from verl_padding.job.vendor import VENDOR
from verl_padding.pads.planned_call import BATCH_ROW, CALL, PlannedCall, cut_into, mini_batches
from verl_padding.worker.padded_engine import SCHEDULER_STEPS, STEPS


class Watched(Rank):
    """A rank that tells what each optimizer step is given."""

    def __init__(self):
        super().__init__(
            dp_rank=1, dp_size=2, answers=True, numbers=lambda data: data[BATCH_ROW].tolist()
        )
        self.scheduler_moves: list[bool] = []

    def train_batch(self, data):
        output = super().train_batch(data)
        self.scheduler_moves.append(tu.get(data, "update_lr_scheduler"))
        return output


def rows_of_a_rank(local_batch_rows_M, *, epochs, **said):
    """As verl's workers get them: with the column and keys of an update."""
    n_rows, ends = sum(local_batch_rows_M), [*accumulate(local_batch_rows_M, initial=0)]
    texts = [torch.arange(2 + row) for row in range(n_rows)]
    rows = {
        BATCH_ROW: torch.arange(n_rows),
        "texts": torch.nested.as_nested_tensor(texts, layout=torch.jagged),
    }
    data = TensorDict(rows, batch_size=n_rows)
    layout = layout_of_local_batches(
        n_rows, [[tuple(range(*local_batch))] for local_batch in pairwise(ends)]
    )
    steps = mini_batches(layout, [1] * n_rows, [1] * n_rows)
    call = PlannedCall(layout=layout, mini_batches=deque(steps * epochs))
    for key, value in ({"epochs": epochs, CALL: call} | cut_into(layout) | said).items():
        tu.assign_non_tensor_data(data, key, value)  # as verl's workers do
    return data


@given(
    local_batch_rows_M=st.lists(st.integers(1, 5), min_size=1, max_size=5), epochs=st.integers(1, 3)
)
def test_verl_trains_on_the_mini_batches_in_each_epoch(local_batch_rows_M, epochs):
    rank = Watched()
    for _ in range(2):  # calls
        rank.mini_batches, rank.scheduler_moves = [], []
        rank.engine.done.clear()
        output = rank.train_mini_batch(rows_of_a_rank(local_batch_rows_M, epochs=epochs))
        starts = [sum(local_batch_rows_M[:number]) for number in range(len(local_batch_rows_M))]
        want = [
            list(range(start, start + rows))
            for rows, start in zip(local_batch_rows_M, starts, strict=True)
        ]
        assert rank.mini_batches == want * epochs
        assert rank.scheduler_moves == [False] * (len(want) * epochs - 1) + [True]
        assert tu.get(output, "metrics")["rows"] == [*local_batch_rows_M] * epochs
        assert rank.engine.done == {STEPS: len(want) * epochs, SCHEDULER_STEPS: 1}


def test_a_call_that_no_plan_has_cut_is_verls():
    rank, data = Watched(), rows_of_a_rank([2, 2], epochs=1).select(BATCH_ROW, "texts")
    tu.assign_non_tensor(data, mini_batch_size=4, epochs=2)
    rank.train_mini_batch(data)
    assert rank.mini_batches == [[0, 1], [2, 3]] * 2
    assert rank.scheduler_moves == [False, False, False, True]


@pytest.mark.parametrize("local_batch_rows_M", [[4], [3, 1], [2, 2]])
@pytest.mark.parametrize(
    "said", [{"dataloader_kwargs": {}}, {"dataloader_kwargs": {}, "num_mini_batch": 2}]
)
def test_mini_batches_that_are_not_cut_as_planned_are_refused(local_batch_rows_M, said):
    # As if a later verl did not hand these arguments on, or shuffled.
    rank, data = Watched(), rows_of_a_rank(local_batch_rows_M, epochs=1, **said)
    if local_batch_rows_M == [2, 2] and "num_mini_batch" in said:
        tu.assign_non_tensor_data(data, "dataloader_kwargs", {"shuffle": True})
    with pytest.raises(PaddingDataError, match="an optimizer step has"):
        rank.train_mini_batch(data)
    assert not rank.mini_batches


REGISTRY = """
import os
import sys
if sys.argv[1:]:
    os.environ["VERL_ENGINE_VENDOR"] = sys.argv[1]
from verl.workers.engine import EngineRegistry
for model_type in ("language_model", "value_model"):
    for backend in ("fsdp", "fsdp2"):
        engine = EngineRegistry.get_engine_cls(model_type, backend)
        print(*(each.__name__ for each in engine.__mro__))
"""


def test_without_the_variable_verls_registry_has_nothing_of_ours():
    engines = run_fresh(REGISTRY, platform="cpu").stdout.splitlines()
    assert len(engines) == 4
    assert not [engine for engine in engines if "Padded" in engine or "Sharing" in engine]


OWN_ENGINE = """
from verl.workers.engine import BaseEngine
from verl_padding.worker.padded_engine import register_padded_engines
@EngineRegistry.register("language_model", "own", "cpu")
class Own(BaseEngine): ...
print(EngineRegistry.get_engine_cls("language_model", "own").__name__)
register_padded_engines()
print(EngineRegistry.get_engine_cls("language_model", "own").__name__)
"""


def test_with_it_each_engine_of_verl_is_a_padded_one_and_by_a_call_a_users():
    ran = run_fresh(REGISTRY + OWN_ENGINE, VENDOR, platform="cpu")
    *engines, own, of_call = ran.stdout.splitlines()
    assert len(engines) == 4
    for engine in engines:
        first, *behind = engine.split()
        assert first == f"Padded{behind[2]}"
        assert behind[:2] == ["SharingEngine", "PaddedEngine"]
    assert (own, of_call) == ("Own", "PaddedOwn")
