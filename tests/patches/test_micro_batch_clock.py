"""The clock on an engine of verl's kind, with the events of a device that only counts."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.pads.columns import BATCH_ROW, TIMED_CALL
from verl_padding.patches import micro_batch_clock
from verl_padding.patches.micro_batch_clock import MicroBatchClock


class Device:
    """Events a second apart; it counts how often it is waited for."""

    def __init__(self):
        self.waited = self.marks = 0

    def synchronize(self):
        self.waited += 1

    def max_memory_reserved(self):
        return 7

    def max_memory_allocated(self):
        return 5

    def Event(self, enable_timing):
        assert enable_timing
        device = self

        class Event:
            def record(self):
                device.marks += 1
                self.at = device.marks

            def elapsed_time(self, later):
                return 1000.0 * (later.at - self.at)

        return Event()


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
    rows = torch.nested.as_nested_tensor([torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged)
    made = TensorDict(
        {"input_ids": rows, BATCH_ROW: torch.tensor([*range(len(lengths) - 1), -1])}, batch_size=len(lengths)
    )
    if timed:
        tu.assign_non_tensor(made, **{TIMED_CALL: "actor"})
    return made


@pytest.fixture
def device(monkeypatch) -> Device:
    made = Device()
    monkeypatch.setattr(micro_batch_clock, "get_torch_device", lambda: made)
    monkeypatch.setattr(micro_batch_clock, "get_device_name", lambda: "cuda")
    return made


@pytest.mark.parametrize("iterates", [False, True], ids=["a micro-batch", "an iterator"])
def test_laps_lie_between_events_and_nothing_waits_until_they_are_read(device, iterates):
    engine = Engine(iterates=iterates)
    clock = MicroBatchClock(engine)
    clock.wrap()
    assert engine.forward_backward_batch(data(5, 9, 2), None) == [[5], [9], [2]]
    assert engine.forward_backward_batch(data(4, 2), None) == [[4], [2]]
    assert device.waited == 0
    laps = clock.read()
    assert device.waited == 1
    assert [(lap.mini_batch, lap.micro_batch, lap.computed_tokens, lap.rows, lap.pads) for lap in laps] == [
        (0, 0, (5,), (0,), 0),
        (0, 1, (9,), (1,), 0),
        (0, 2, (2,), (), 1),
        (1, 0, (4,), (0,), 0),
        (1, 1, (2,), (), 1),
    ]
    assert {(lap.call, lap.rank, lap.seconds, lap.busy_s, lap.reserved_bytes, lap.allocated_bytes) for lap in laps} == {
        ("actor", 3, 1.0, None, 7, 5)
    }
    assert clock.read() == []


def test_a_lap_of_a_pipeline_is_a_whole_mini_batch(device):
    engine = Engine(pipeline=2)
    clock = MicroBatchClock(engine)
    clock.wrap()
    engine.forward_backward_batch(data(5, 9, 2), None)
    (lap,) = clock.read()
    assert (lap.computed_tokens, lap.rows, lap.pads) == ((5, 9, 2), (0, 1), 1)


def test_calls_that_are_not_timed_leave_no_mark(device):
    engine = Engine()
    clock = MicroBatchClock(engine)
    clock.wrap()
    assert engine.forward_backward_batch(data(5, 2, timed=False), None) == [[5], [2]]
    assert device.marks == 0
    assert clock.read() == []
