"""A clock in verl's workers: what each micro-batch takes, and which rows it holds.

verl times whole calls. Here a padded engine sets a mark where each micro-batch begins and where the
call ends. A micro-batch's seconds lie between two marks. On a GPU marks are events, which wait for
nothing and are read when the step is over.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from tensordict import TensorDict
from verl.utils.device import get_device_name, get_torch_device

from verl_padding.pads.columns import BATCH_ROW, read_column
from verl_padding.pads.planned_call import PlannedCall, planned_call
from verl_padding.prefix_sharing.prefix_trie import computed_rows
from verl_padding.record.timings import MicroBatchTiming
from verl_padding.worker.training_workers import answer, training_workers

TIMINGS = "timings"
"""Name of the timings in what a worker answers."""


class MicroBatchClock:
    """Takes the timings of one engine of verl, on one rank, in calls that ask for it."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._device = get_torch_device()
        self._has_events = get_device_name() != "cpu"
        # In a pipeline the passes of several micro-batches take turns: only their sum can be
        # measured.
        self._whole = (getattr(engine.engine_config, "pipeline_model_parallel_size", 1) or 1) > 1
        self._call: PlannedCall | None = None
        self._n_timed: Counter[str | None] = Counter()  # mini-batches of each call
        self._marks: list[tuple[Any, dict[str, Any] | None]] = []
        """Where each micro-batch begins, with its values in a timing, and where each mini-batch
        ends."""

    def read(self) -> list[MicroBatchTiming]:
        """The timings since they were read last; on a GPU it waits for what is still under way."""
        if not self._marks:
            return []
        now = self._now()
        if self._has_events:
            self._device.synchronize()
        ended_s = time.time()
        # Marks at 0, 3 and 7 s: micro-batches of 3 and 4 s.
        timings = [
            MicroBatchTiming(
                rank=self._engine.get_data_parallel_rank(),
                start_s=ended_s - self._seconds(begin, now),
                seconds=self._seconds(begin, end),
                **values,
            )
            for (begin, values), (end, _) in pairwise(self._marks)
            if values is not None
        ]
        self._marks.clear()
        self._n_timed.clear()
        return timings

    @contextmanager
    def mini_batch(self, data: TensorDict) -> Iterator[None]:
        """A with-block in which a mini-batch, or a pass, is timed, if its call says so."""
        call = planned_call(data)
        if call is None or call.timed_as is None:
            yield
            return
        self._call = call
        if self._whole:
            self._begin(data)
        try:
            yield
        finally:
            self._call = None
        self._marks.append((self._now(), None))
        self._n_timed[call.timed_as] += 1

    def micro_batch(self, micro_batch: Any) -> Any:
        """Marks the beginning of what an engine's ``forward_step`` gets, and returns it."""
        if self._call is None or self._whole:
            return micro_batch
        data = micro_batch
        if not isinstance(micro_batch, TensorDict):  # Megatron's engine takes it from an iterator
            data = next(micro_batch)
            micro_batch = iter([data])
        self._begin(data)
        return micro_batch

    def _begin(self, data: TensorDict) -> None:
        """Marks the beginning of a micro-batch and its rows, which are on the CPU: nothing waits
        for a device."""
        assert self._call is not None, "a micro-batch of no call"
        now, number_R = self._now(), read_column(data, BATCH_ROW).tolist()
        rows = tuple(number for number in number_R if number < self._call.layout.n_rows)
        _, computed, shared = zip(*computed_rows(data), strict=True)
        before = self._marks[-1][1] if self._marks else None
        values = {
            "call": self._call.timed_as,
            "mini_batch": self._n_timed[self._call.timed_as],
            "micro_batch": 0 if before is None else before["micro_batch"] + 1,
            "rows": rows,
            "pads": len(number_R) - len(rows),
            "computed_tokens": computed,
            "shared_tokens": shared if any(shared) else (),
        }
        self._marks.append((now, values))

    def _now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._has_events else end - begin)


def read_in_worker(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: what a worker's engines took, a list in
    ``non_tensor_batch[TIMINGS]``."""
    # Of ranks that share their rows, only one answers.
    timings = [
        timing
        for training_worker in training_workers(worker).values()
        for timing in training_worker.engine.clock.read()
        if training_worker.engine.is_mp_src_rank_with_outputs()
    ]
    return answer(**{TIMINGS: timings})
