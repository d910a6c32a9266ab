"""Worker groups whose batch calls get the padded batch, while the trainer goes on with the real rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from verl_padding.errors import PaddingDataError
from verl_padding.job import ACTOR, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.queue import KVBatchMeta, n_rows

INFERENCE_CALLS = {"compute_log_prob": LOG_PROB, "compute_ref_log_prob": REF, "infer_batch": VALUES}
"""Method of verl's worker groups -> inference pass of the plan."""
UPDATE_CALLS = {"update_actor": ACTOR, "train_mini_batch": CRITIC}
"""Method of verl's worker groups -> update of the plan."""


class PaddedWorkerGroup:
    """Stands before a worker group of verl: its batch calls take real rows and send the padded ones.

    So verl's trainer methods run as they are, and nothing but a worker call can see a pad. Everything else goes
    through to the worker group.

    Args:
        worker_group: verl's.
        current: gives the padded batch of the step that runs, or None outside of one.
    """

    def __init__(self, worker_group: Any, current: Callable[[], PaddedBatch | None]):
        self._worker_group = worker_group
        self._current = current

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._worker_group, name)
        if name in INFERENCE_CALLS:
            return lambda batch: self._infer(target, INFERENCE_CALLS[name], batch)
        if name in UPDATE_CALLS:
            return lambda batch: self._update(target, UPDATE_CALLS[name], batch)
        return target

    def _infer(self, target: Callable[[KVBatchMeta], Any], call: str, batch: KVBatchMeta) -> Any:
        padded = self._current()
        assert padded is not None, f"worker call {call!r} outside of a step: no plan for its rows"
        sent = padded.inference_call(call, batch)
        output = target(sent)
        if isinstance(output, KVBatchMeta):
            _check_count(call, len(sent), len(output))
            return padded.real_output(output, batch)
        # The critic's pass answers with a future of each rank's answer, that verl waits for next.
        answers = ray.get(output.futures) if output is not None else []
        _check_count(call, len(sent), sum(map(n_rows, answers)))
        return output

    def _update(self, target: Callable[[KVBatchMeta], Any], call: str, batch: KVBatchMeta) -> Any:
        padded = self._current()
        assert padded is not None, f"worker call {call!r} outside of a step: no plan for its rows"
        return target(padded.update_call(call, batch))


def _check_count(call: str, sent: int, came: int) -> None:
    if came != sent:
        raise PaddingDataError(
            f"worker call {call!r}: {sent} rows were sent and {came} outputs came back. None of them is used. Look "
            "into the workers' logs for the reason."
        )
