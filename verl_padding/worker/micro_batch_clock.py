"""A clock in verl's workers: what each micro-batch takes, and which rows it holds.

verl times whole calls. Here a padded engine sets a mark where each micro-batch begins and where the
call ends. A micro-batch's seconds lie between two marks. On a GPU marks are events, which wait for
nothing and are read when the step is over.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from tensordict import TensorDict
from verl.utils.device import get_device_name, get_torch_device

from verl_padding.pads.columns import BATCH_ROW, read_column
from verl_padding.pads.planned_call import planned_call
from verl_padding.prefix_sharing.prefix_trie import computed_rows
from verl_padding.record.timings import MicroBatchTiming
from verl_padding.worker.training_workers import training_workers

TIMINGS = "timings"
"""Name of the timings in what a worker answers."""


@dataclass
class _MiniBatch:
    """One call of the engine; ``held`` goes by the names of :class:`MicroBatchTiming`."""

    call: str
    n_rows: int
    """Real rows of the batch."""
    number: int
    start_s: float = field(default_factory=time.time)
    held: list[dict[str, Any]] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)


class MicroBatchClock:
    """Takes the timings of one engine of verl, on one rank, in calls that ask for it."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._device = get_torch_device()
        self._has_events = get_device_name() != "cpu"
        # In a pipeline the passes of several micro-batches take turns: only their sum can be
        # measured.
        self._whole = (getattr(engine.engine_config, "pipeline_model_parallel_size", 1) or 1) > 1
        self._timed: list[_MiniBatch] = []
        self._current: _MiniBatch | None = None

    def read(self) -> list[MicroBatchTiming]:
        """The timings since they were read last; on a GPU it waits for what is still under way."""
        timed, self._timed = self._timed, []
        if timed and self._has_events:
            self._device.synchronize()
        return [timing for each in timed for timing in self._timings(each)]

    @contextmanager
    def mini_batch(self, data: TensorDict) -> Iterator[None]:
        """A with-block in which a mini-batch, or a pass, is timed, if its call says so."""
        call = planned_call(data)
        if call is None or call.timed_as is None:
            yield
            return
        number = sum(each.call == call.timed_as for each in self._timed)
        timed = _MiniBatch(call.timed_as, call.layout.n_rows, number)
        if self._whole:
            self._begin(timed, data)
        else:
            self._current = timed
        try:
            yield
        finally:
            self._current = None
        timed.marks.append(self._mark())
        self._timed.append(timed)

    def micro_batch(self, micro_batch: Any) -> Any:
        """Marks the beginning of what an engine's ``forward_step`` gets, and returns it."""
        if self._current is None:
            return micro_batch
        data = micro_batch
        if not isinstance(micro_batch, TensorDict):  # Megatron's engine takes it from an iterator
            data = next(micro_batch)
            micro_batch = iter([data])
        self._begin(self._current, data)
        return micro_batch

    def _begin(self, timed: _MiniBatch, data: TensorDict) -> None:
        """Marks the beginning of a micro-batch and its rows, which are on the CPU: nothing waits
        for a device."""
        timed.marks.append(self._mark())
        number_R = read_column(data, BATCH_ROW).tolist()
        rows = tuple(number for number in number_R if number < timed.n_rows)
        _, computed, shared = zip(*computed_rows(data), strict=True)
        held = {"rows": rows, "pads": len(number_R) - len(rows), "computed_tokens": computed}
        timed.held.append(held | {"shared_tokens": shared if any(shared) else ()})

    def _mark(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._has_events else end - begin)

    def _timings(self, timed: _MiniBatch) -> Iterator[MicroBatchTiming]:
        # Marks at 0, 3 and 7 s: micro-batches of 3 and 4 s.
        start_s = timed.start_s
        for micro_batch, (held, (begin, end)) in enumerate(
            zip(timed.held, pairwise(timed.marks), strict=True)
        ):
            seconds = self._seconds(begin, end)
            yield MicroBatchTiming(
                call=timed.call,
                rank=self._engine.get_data_parallel_rank(),
                mini_batch=timed.number,
                micro_batch=micro_batch,
                start_s=start_s,
                seconds=seconds,
                **held,
            )
            start_s += seconds


def read_in_worker(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: what a worker's engines took, as
    ``non_tensor_batch[TIMINGS]``."""
    from verl.protocol import DataProto

    # Of ranks that share their rows, only one answers.
    engines = [training_worker.engine for training_worker in training_workers(worker).values()]
    timings = [
        timing
        for engine in engines
        for timing in engine.clock.read()
        if engine.is_mp_src_rank_with_outputs()
    ]
    answer = np.empty(len(timings), dtype=object)
    answer[:] = timings
    return DataProto(non_tensor_batch={TIMINGS: answer})
