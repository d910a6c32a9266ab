"""The workers that train or ask a model, inside of what Ray runs; what they answer, and rows as
they get them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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


def answer(**values: Any) -> Any:
    """A rank's answer, of a class that verl concatenates over ranks: ``non_tensor_batch`` has an
    array with each rank's value."""
    from verl.protocol import DataProto

    arrays = {name: np.fromiter([value], dtype=object) for name, value in values.items()}
    return DataProto(non_tensor_batch=arrays)


def worker_data(ids_R: Sequence[torch.Tensor], **fields: Sequence[torch.Tensor]) -> TensorDict:
    """What a worker gets of rows with these tokens, of which the first is the prompt, and with
    fields that are jagged, too."""
    columns = {
        "input_ids": ids_R,
        "prompts": [ids[:1] for ids in ids_R],
        "responses": [ids[1:] for ids in ids_R],
    }
    jagged_F = {
        name: tu.nested_tensor_from_tensor_list(list(value_R))
        for name, value_R in (columns | fields).items()
    }
    return TensorDict(jagged_F, batch_size=len(ids_R))
