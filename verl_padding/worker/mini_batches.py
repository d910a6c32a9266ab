"""The plan's mini-batches in verl's workers, whose numbers of rows differ.

verl's ``train_mini_batch`` takes mini-batches from a DataLoader to which the trainer may give arguments. One of one row
admits a ``batch_sampler``, which says what rows are in each. verl counts such mini-batches as it would count those of
one row, so it never comes to the last one, after which the scheduler of the learning rate takes its step: that is told
here. It can go when verl counts what its DataLoader yields (tests/worker/test_mini_batches.py).
"""

import functools
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import EPOCHS_OF_CALL, MINI_BATCH, N_MINI_BATCHES, read_column
from verl_padding.worker.training_workers import for_training_workers


@for_training_workers
def install_in_worker(role: str, trainee: Any) -> None:
    """For verl's ``execute_with_func_generator``: has each training worker take its optimizer steps as planned."""
    trainee.train_batch = take_planned_steps(trainee.train_batch)


def take_planned_steps(train_batch: Callable[[TensorDict], Any]) -> Callable[[TensorDict], Any]:
    """verl's ``train_batch``; the scheduler takes its step after the last mini-batch of the last epoch.

    A PaddingDataError if a mini-batch has other rows than those that are next: verl would train on wrong ones.
    """
    taken = 0

    @functools.wraps(train_batch)
    def train_next(data: TensorDict) -> Any:
        nonlocal taken
        n_mini_batches = tu.get_non_tensor_data(data=data, key=N_MINI_BATCHES, default=None)
        if n_mini_batches is None:
            return train_batch(data)
        planned, numbers = taken % n_mini_batches, set(read_column(data, MINI_BATCH).tolist())
        if numbers != {planned}:
            raise PaddingDataError(
                f"an optimizer step has rows of mini-batches {sorted(numbers)}, where {planned} is next: verl's "
                "workers do not cut a batch as verl 0.9.1 does. Train with that, or without +padding."
            )
        taken = (taken + 1) % (n_mini_batches * tu.get_non_tensor_data(data=data, key=EPOCHS_OF_CALL, default=1))
        tu.assign_non_tensor(data, update_lr_scheduler=taken == 0)
        return train_batch(data)

    return train_next
