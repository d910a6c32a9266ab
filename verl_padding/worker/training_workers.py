"""The workers that train or ask a model, inside of what Ray runs."""

from __future__ import annotations

from typing import Any


def training_workers(worker: Any) -> dict[str, Any]:
    """Role (``actor``, ``ref``, ``critic``) -> verl's ``TrainingWorker``, each with an ``engine``.

    An ``ActorRolloutRefWorker`` holds its training workers; a critic is one.
    """
    held = {role: trainee for role in ("actor", "ref") if (trainee := getattr(worker, role, None)) is not None}
    return held or {"critic": worker}
