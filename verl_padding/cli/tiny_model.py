"""The command ``verl-padding tiny-model``: a model to try an agent with, on a machine without GPU and network."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console

from verl_padding.errors import PaddingConfigError, PaddingDataError, PaddingError
from verl_padding.local.tiny_models import MADE_OF, TinyModelKind, write_tiny_model


def make_model(folder: Path, family: TinyModelKind, seed: int) -> int:
    """Makes the model, unless the folder holds it already, and says how a job names it; returns the exit code."""
    try:
        made = _make(folder, family, seed)
    except PaddingError as refusal:
        Console(stderr=True).print(str(refusal), style="red", markup=False, soft_wrap=True)
        return 1
    told = "is now" if made else "was already"
    Console().print(
        f"A tiny {family} model with random weights (seed {seed}) {told} in {folder}. In a job: "
        f"actor_rollout_ref.model.path={folder.resolve()}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _make(folder: Path, family: TinyModelKind, seed: int) -> bool:
    """Whether the model had to be made.

    Raises:
        PaddingDataError: the folder holds something else, or cannot be written. Nothing in it has been touched.
        PaddingConfigError: the family takes packages that are not installed.
    """
    try:
        return _made_now(folder, family, seed)
    except ImportError as error:
        raise PaddingConfigError(
            f"--family={family}: takes packages that are not installed. Install the extra in a checkout: "
            'pip install -e ".[vision]".'
        ) from error
    except OSError as error:
        raise PaddingDataError(f"{folder}: cannot be written ({error.strerror}). Name another folder.") from error


def _made_now(folder: Path, family: TinyModelKind, seed: int) -> bool:
    if os.path.lexists(folder) and not folder.is_dir():
        raise PaddingDataError(f"{folder}: is a file, but a folder is needed for the model. Name another.")
    found = _made_of(folder)
    if found is not None:
        if found == (family, seed):
            return False
        raise PaddingDataError(
            f"{folder}: holds the tiny {found[0]} model of seed {found[1]}, not the {family} model of seed {seed}. "
            "Name another folder, or remove this one."
        )
    if folder.resolve() == Path.cwd():
        raise PaddingDataError(f"{folder}: is the folder that you are in. Name one below it, such as model.")
    if folder.is_dir() and any(folder.iterdir()):
        raise PaddingDataError(f"{folder}: holds other files. Name a folder that is empty or not there yet.")
    write_tiny_model(family, folder, seed=seed)
    return True


def _made_of(folder: Path) -> tuple[str, int] | None:
    """Kind and seed of the tiny model that a folder holds, if it holds one."""
    try:
        said = json.loads((folder / MADE_OF).read_text())
        return str(said["kind"]), int(said["seed"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
