"""Worker groups whose batch calls get the padded batch, while the trainer goes on with the real rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import CALLS, WorkerCall
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.queue import KVBatchMeta, n_rows
from verl_padding.plan.counted import counted

CALL_OF_METHOD = {call.method: call for call in CALLS}
"""Method of verl's worker groups -> the call that is planned."""


class PaddedWorkerGroup:
    """Wraps a worker group of verl: its batch calls take real rows and send the padded ones.

    So verl's trainer methods run as they are, and only a worker call can see a pad. Everything else goes through to the
    worker group, and so does a batch that is not in TransferQueue. A call outside of a step, or with other rows than
    the step has planned for it, gets a plan and pads of its own, which are gone when it returns. Workers count their
    peak memory anew for each call: verl logs the highest since the process began.

    Args:
        worker_group: verl's.
        current: returns the padded batch of the step that runs, or None outside of a step.
        plan_single_call: makes a with-block's padded batch for one call, from the plan's name of it and its rows.
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
        target = getattr(self._worker_group, name)
        return partial(self._call, CALL_OF_METHOD[name], target) if name in CALL_OF_METHOD else target

    def _call(self, call: WorkerCall, target: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(batch, KVBatchMeta):
            return target(batch, *args, **kwargs)

        def send(padded: PaddedBatch) -> Any:
            self._worker_group.execute_with_func_generator(start_peak)
            if call.trains:
                return target(padded.update_call(call.name, batch), *args, **kwargs)
            sent = padded.inference_call(call.name, batch)
            output = target(sent, *args, **kwargs)
            if isinstance(output, KVBatchMeta):
                _check_count(call.name, len(sent), len(output))
                return padded.real_output(output, batch)
            # The critic's pass answers with a future of each rank's answer, which verl waits for next.
            answers = ray.get(output.futures) if output is not None else []
            _check_count(call.name, len(sent), sum(map(n_rows, answers)))
            return output

        padded = self._current()
        if padded is not None and padded.has_planned(call.name, batch):
            return send(padded)
        assert self._plan_single_call is not None, f"no step has planned these rows for {call.name}"
        with self._plan_single_call(call.name, batch) as apart:
            output = send(apart)
            # The pads are gone after the block, and some calls return before the workers have read them.
            ray.get(getattr(output, "futures", []))
            return output


def start_peak(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: the peak memory that a call reports is its own, not the process's."""
    from verl.protocol import DataProto
    from verl.utils.device import get_torch_device

    if hasattr(get_torch_device(), "reset_peak_memory_stats"):
        get_torch_device().reset_peak_memory_stats()
    return DataProto()


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
