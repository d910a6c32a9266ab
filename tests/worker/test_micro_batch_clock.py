"""The clock on an engine of verl's kind, with the events of a device that only counts."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.plan_oracles import layout_of_local_batches
from verl_padding.pads.columns import BATCH_ROW
from verl_padding.pads.planned_call import CALL, PlannedCall
from verl_padding.prefix_sharing.prefix_trie import TRIE, build_trie
from verl_padding.record.timings import MicroBatchTiming
from verl_padding.worker import micro_batch_clock
from verl_padding.worker.padded_engine import padded


class Device:
    """Events a second apart; it counts how often it is waited for."""

    def __init__(self):
        self.waited = self.marks = 0

    def synchronize(self):
        self.waited += 1

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device = device

    def record(self):
        self.device.marks += 1
        self.at = self.device.marks

    def elapsed_time(self, later):
        return 1000.0 * (later.at - self.at)


class Engine:
    """Runs each row as a micro-batch, as FSDP's engine does, or from an iterator, as Megatron's."""

    def __init__(self, *, iterates: bool = False, pipeline: int = 1):
        self.engine_config = SimpleNamespace(pipeline_model_parallel_size=pipeline)
        self.iterates = iterates

    def get_data_parallel_rank(self):
        return 3

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        outputs = []
        for row in range(len(data)):
            held = tu.index_select_tensor_dict(data, [row])
            outputs.append(self.forward_step(iter([held]) if self.iterates else held))
        return outputs

    def forward_step(self, micro_batch):
        held = next(micro_batch) if self.iterates else micro_batch
        return held["input_ids"].offsets().diff().tolist()


def data(*lengths: int, timed: bool = True) -> TensorDict:
    rows = torch.nested.as_nested_tensor(
        [torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged
    )
    numbers = torch.arange(len(lengths))  # the last one is a pad
    made = TensorDict({"input_ids": rows, BATCH_ROW: numbers}, batch_size=len(lengths))
    layout = layout_of_local_batches(len(lengths) - 1, [[tuple(range(len(lengths)))]])
    call = PlannedCall(layout=layout, timed_as="actor" if timed else None)
    tu.assign_non_tensor_data(made, CALL, call)
    return made


def timings_of(engine: type[Engine], rows: TensorDict, **of_engine: Any) -> list[MicroBatchTiming]:
    made = padded(engine)(**of_engine)
    made.forward_backward_batch(rows, None)
    return made.clock.read()


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(micro_batch_clock, "get_torch_device", lambda: made)
    monkeypatch.setattr(micro_batch_clock, "get_device_name", lambda: "cuda")
    return made


@pytest.mark.parametrize("iterates", [False, True], ids=["a micro-batch", "an iterator"])
def test_timings_lie_between_events_and_nothing_waits_until_they_are_read(device, iterates):
    engine = padded(Engine)(iterates=iterates)
    clock = engine.clock
    assert engine.forward_backward_batch(data(5, 9, 2), None) == [[5], [9], [2]]
    assert engine.forward_backward_batch(data(4, 2), None) == [[4], [2]]
    assert device.waited == 0
    timings = clock.read()
    assert device.waited == 1
    assert [
        (timing.mini_batch, timing.micro_batch, timing.computed_tokens, timing.rows, timing.pads)
        for timing in timings
    ] == [
        (0, 0, (5,), (0,), 0),
        (0, 1, (9,), (1,), 0),
        (0, 2, (2,), (), 1),
        (1, 0, (4,), (0,), 0),
        (1, 1, (2,), (), 1),
    ]
    # Two marks are a second: where a micro-batch begins, where the next one begins.
    assert {(timing.call, timing.seconds) for timing in timings} == {("actor", 1.0)}
    assert {timing.rank for timing in timings} == {3}
    assert clock.read() == []


def test_a_timing_of_a_pipeline_is_of_a_whole_mini_batch(device):
    (timing,) = timings_of(Engine, data(5, 9, 2), pipeline=2)
    assert (timing.computed_tokens, timing.rows, timing.pads) == ((5, 9, 2), (0, 1), 1)


def test_calls_that_are_not_timed_leave_no_mark(device):
    assert timings_of(Engine, data(5, 2, timed=False)) == []
    assert device.marks == 0


def test_of_rows_that_share_a_prefix_the_longest_counts_as_computed(device):
    class InOne(Engine):
        def forward_backward_batch(self, data, loss_function, forward_only=False):
            return [self.forward_step(data)]

    shared = data(5, 9, 4, 2)
    # Row 0 is the beginning of row 1, and row 2 branches off it after 3 tokens, of which the last
    # is computed again.
    tu.assign_non_tensor(shared, **{TRIE: build_trie([5, 9, 4, 2], [1, 0, 2, 3], [0, 5, 3, 0])})
    (timing,) = timings_of(InOne, shared)
    assert (timing.computed_tokens, timing.shared_tokens, timing.rows, timing.pads) == (
        (9, 4, 2),
        (0, 2, 0),
        (0, 1, 2),
        1,
    )
    assert timing.tokens == 13


def test_on_a_cpu_a_timing_is_by_the_clock_of_the_wall():
    class Sleeps(Engine):
        def forward_step(self, micro_batch):
            time.sleep(0.1)

    began = time.time()
    first, second = timings_of(Sleeps, data(5, 9))
    ended = time.time()
    assert min(first.seconds, second.seconds) >= 0.1
    assert first.start_s + first.seconds == pytest.approx(second.start_s)
    assert began - 0.05 < first.start_s < second.start_s + second.seconds < ended + 0.05
