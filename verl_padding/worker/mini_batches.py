"""The plan's mini-batches in verl's workers, whose numbers of rows differ.

verl's ``train_mini_batch`` takes mini-batches from a DataLoader to which the trainer may give
arguments. One of one row admits a ``batch_sampler``, which says what rows are in each. verl counts
such mini-batches as it would count those of one row, so it never comes to the last one, after which
the scheduler of the learning rate takes its step: that is told here. It can go when verl counts
what its DataLoader yields (tests/worker/test_mini_batches.py).
"""

import functools
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import MINI_BATCH, OPTIMIZER_STEPS, read_column
from verl_padding.worker.training_workers import for_training_workers

PLANNED = "takes_planned_steps"
"""Attribute of a ``train_batch`` that is wrapped."""


@for_training_workers
def install_in_worker(role: str, training_worker: Any) -> None:
    """For verl's ``execute_with_func_generator``: has each training worker take its optimizer steps
    as planned."""
    if not hasattr(training_worker.train_batch, PLANNED):
        training_worker.train_batch = take_planned_steps(training_worker.train_batch)


def take_planned_steps(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    """verl's ``train_batch``; the scheduler takes its step after the last mini-batch of the last
    epoch.

    A PaddingDataError if a mini-batch has other rows than those that are next: verl would train on
    wrong ones.
    """

    @functools.wraps(train_batch)
    def train_next(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, TensorDict) or OPTIMIZER_STEPS not in data:
            return train_batch(data, *args, **kwargs)
        # All mini-batches of a call have the same one.
        to_come = tu.get_non_tensor_data(data=data, key=OPTIMIZER_STEPS, default=None)
        number_R = read_column(data, MINI_BATCH).tolist()
        planned = to_come.popleft() if to_come else None
        if planned is None or set(number_R) != {planned[0]} or len(number_R) != planned[1]:
            raise PaddingDataError(
                f"an optimizer step has {len(number_R)} rows of mini-batches "
                f"{sorted(set(number_R))}, where (number, rows) {planned} is next: verl's workers "
                "do not cut a batch as verl 0.9.1 does. Train with that, or without +padding."
            )
        tu.assign_non_tensor(data, update_lr_scheduler=not to_come)
        return train_batch(data, *args, **kwargs)

    setattr(train_next, PLANNED, True)
    return train_next
