"""The workers that train or ask a model, inside of what Ray runs."""

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


def training_workers(worker: Any) -> dict[str, Any]:
    """Role (``actor``, ``ref``, ``critic``) -> verl's ``TrainingWorker``, each with an ``engine``.

    An ``ActorRolloutRefWorker`` holds its training workers; a critic is one.
    """
    held = {
        role: training_worker
        for role in ("actor", "ref")
        if (training_worker := getattr(worker, role, None)) is not None
    }
    return held or {"critic": worker}


def token_budget(data: TensorDict) -> int:
    """Most tokens of a micro-batch of a call; Ulysses ranks, which share its rows, have a part
    each."""
    ranks = tu.get_non_tensor_data(data=data, key="sp_size", default=1)
    return int(data["max_token_len_per_gpu"]) * int(ranks)


def for_training_workers(change: Callable[[str, Any], None]) -> Callable[[Any], Any]:
    """For verl's ``execute_with_func_generator``: calls ``change`` with role and training worker,
    for each of them."""

    def change_all(worker: Any) -> Any:
        from verl.protocol import DataProto

        for role, training_worker in training_workers(worker).items():
            change(role, training_worker)
        return DataProto()  # empty, and of a class that verl can concatenate over ranks

    return change_all
