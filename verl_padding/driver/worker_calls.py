"""Worker groups whose batch calls get the padded batch, while the trainer goes on with the real rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import ray

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import CALLS
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.queue import KVBatchMeta, n_rows
from verl_padding.plan.counted import counted

INFERENCE_CALLS = {call.method: call.name for call in CALLS if not call.trains}
"""Method of verl's worker groups -> inference pass of the plan."""
UPDATE_CALLS = {call.method: call.name for call in CALLS if call.trains}
"""Method of verl's worker groups -> update of the plan."""


class PaddedWorkerGroup:
    """Wraps a worker group of verl: its batch calls take real rows and send the padded ones.

    So verl's trainer methods run as they are, and only a worker call can see a pad. Everything else goes through to the
    worker group, and so does a batch that is not in TransferQueue. A call outside of a step, or with other rows than
    the step has planned for it, gets a plan and pads of its own, which are gone when it returns. Workers count their
    peak memory anew for each call: verl logs the highest since the process began.

    Args:
        worker_group: verl's.
        current: returns the padded batch of the step that runs, or None outside of a step.
        plan_single_call: makes a with-block's padded batch for one call, from the plan's name of it and its rows;
            without it, calls that need one are refused.
    """

    def __init__(
        self,
        worker_group: Any,
        current: Callable[[], PaddedBatch | None],
        plan_single_call: Callable[[str, KVBatchMeta], AbstractContextManager[PaddedBatch]] | None = None,
    ):
        self._worker_group = worker_group
        self._current = current
        self._plan_single_call = plan_single_call

    def __getattr__(self, name: str) -> Any:
        if name == "_worker_group":  # of a copy in the making, which has no attribute yet
            raise AttributeError(name)
        target = getattr(self._worker_group, name)
        if name in INFERENCE_CALLS or name in UPDATE_CALLS:
            return partial(self._call, name, target)
        return target

    def __copy__(self) -> PaddedWorkerGroup:
        return PaddedWorkerGroup(self._worker_group, self._current, self._plan_single_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedWorkerGroup:
        # Copies the worker group for the same trainer, but not the trainer.
        return PaddedWorkerGroup(deepcopy(self._worker_group, memo), self._current, self._plan_single_call)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the trainer plans, and it stays in its process.
        return PaddedWorkerGroup, (self._worker_group, _no_step)

    def _call(self, name: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        batch = next((value for value in (*args, *kwargs.values()) if isinstance(value, KVBatchMeta)), None)
        if batch is None:
            return target(*args, **kwargs)

        def send(rows: KVBatchMeta) -> Any:
            named = {name: rows if value is batch else value for name, value in kwargs.items()}
            return target(*[rows if value is batch else value for value in args], **named)

        padded = self._current()
        call = INFERENCE_CALLS.get(name) or UPDATE_CALLS[name]
        if padded is not None and padded.has_planned(call, batch):
            return self._send(send, name, padded, batch)
        if self._plan_single_call is None:
            raise PaddingDataError(
                f"worker call {name!r} with {counted(len(batch), 'row')} (the first: {batch.keys[:1]}): no step has "
                "planned them, and only the trainer, in its own process, can plan them now. Make the call there."
            )
        with self._plan_single_call(call, batch) as apart:
            output = self._send(send, name, apart, batch)
            # The pads are gone after the block, and some calls return before the workers have read them.
            ray.get(getattr(output, "futures", []))
            return output

    def _send(self, send: Callable[[KVBatchMeta], Any], name: str, padded: PaddedBatch, batch: KVBatchMeta) -> Any:
        self._worker_group.execute_with_func_generator(start_peak)
        if name in UPDATE_CALLS:
            return send(padded.update_call(UPDATE_CALLS[name], batch))
        call = INFERENCE_CALLS[name]
        sent = padded.inference_call(call, batch)
        output = send(sent)
        if isinstance(output, KVBatchMeta):
            _check_count(call, len(sent), len(output))
            return padded.real_output(output, batch)
        # The critic's pass answers with a future of each rank's answer, which verl waits for next.
        answers = ray.get(output.futures) if output is not None else []
        _check_count(call, len(sent), sum(map(n_rows, answers)))
        return output


def start_peak(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: the peak memory that a call reports is its own, not the process's."""
    from verl.protocol import DataProto
    from verl.utils.device import get_torch_device

    if hasattr(get_torch_device(), "reset_peak_memory_stats"):
        get_torch_device().reset_peak_memory_stats()
    return DataProto()


def _no_step() -> None:
    return None


def _check_count(call: str, sent: int, came: int) -> None:
    if came != sent:
        raise PaddingDataError(
            f"worker call {call!r}: outputs of {came} came back for {counted(sent, 'row')} that were sent. None of "
            "them is used. Look into the workers' logs for the reason."
        )


def dp_size(worker_group: Any, mesh_name: str) -> int:
    """Data-parallel ranks of a worker group, as verl's dispatch asks for them; the answer is kept where it looks."""
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
    return int(max(worker_group._dispatch_info[mesh_name])) + 1
