"""Files of weights in a model's folder: whole, as far as their heads tell. No weight is read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

from verl_padding.doctor.lfs_pointers import is_lfs_pointer

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
LENGTH = 8
"""Bytes at the beginning of a safetensors file that say how long its head is."""
PICKLE = b"\x80"
"""First byte of weights that an old torch has saved."""


def refuse_broken_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Looks at the files that transformers would load.

    Returns: shape of each tensor by name, as far as the heads of the files tell.

    Raises:
        LookupError: one of them is missing or broken, with a sentence.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        if not file.is_file():
            raise LookupError(f"{file.name} is not there, which {_index_of(folder).name} names")
        if is_lfs_pointer(file):
            raise LookupError(f"{file.name} is a pointer of Git LFS, not the file itself (git lfs pull)")
        if file.suffix == ".safetensors":
            shapes |= _shapes(file)
        else:
            _refuse_broken_bin(file)
    return shapes


def _index_of(folder: Path) -> Path:
    return next(folder / f"{name}{INDEX}" for name in (SAFETENSORS, BIN) if (folder / f"{name}{INDEX}").is_file())


def _files(folder: Path) -> list[Path]:
    """In the order in which transformers looks for them."""
    for name in (SAFETENSORS, BIN):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise LookupError(f"{index.name} is no index of weights ({type(error).__name__}: {error})") from error
            return sorted({folder / each for each in named})
    return []


def _shapes(file: Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a safetensors file; its head says how many bytes follow.

    Raises:
        LookupError: it is cut off, or no such file.
    """
    size = file.stat().st_size
    with file.open("rb") as read:
        length = int.from_bytes(read.read(LENGTH), "little")
        try:
            head = json.loads(read.read(length)) if 0 < length <= size - LENGTH else None
            tensors = {name: entry for name, entry in (head or {}).items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise LookupError(f"{file.name} has no head of safetensors ({type(error).__name__}: {error})") from error
    if head is None or LENGTH + length + end > size:
        raise LookupError(f"{file.name} is cut off: it has {size} bytes, and its head tells of more. Fetch it again")
    return shapes


def _refuse_broken_bin(file: Path) -> None:
    with file.open("rb") as read:
        beginning = read.read(1)
    if not zipfile.is_zipfile(file) and beginning != PICKLE:
        raise LookupError(f"{file.name} is no file of torch, or is cut off. Fetch it again")


def refuse_other_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Looks whether tensors have the shapes that the model of the config has under the same names.

    Raises:
        LookupError: one has not, with a sentence.
    """
    for name, shape in found.items():
        if name in wanted and wanted[name] != shape and prod(shape) != prod(wanted[name]):
            raise LookupError(
                f"its weights have {name} of shape {list(shape)}, but by its config.json it is {list(wanted[name])}"
            )
