"""The workers that train or ask a model, inside of what Ray runs."""

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
