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
LONGEST_HEAD = 100_000_000
"""Bytes of a head that the library `safetensors` reads at most."""
PICKLE = b"\x80"
"""First byte of weights that an old torch has saved."""
NOT_READ = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What JSON of any form may raise."""


def refuse_broken_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Looks at the files that transformers would load.

    Returns: shape of each tensor by name, as far as the heads of the files tell.

    Raises:
        LookupError: one of them is missing or broken, with a sentence.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file, named_in in _files(folder).items():
        if not file.is_file():
            raise LookupError(f"{file.name} is not there, which {named_in} names")
        if is_lfs_pointer(file):
            raise LookupError(f"{file.name} is a pointer of Git LFS, not the file itself (git lfs pull)")
        try:
            if file.suffix == ".safetensors":
                shapes |= shapes_in(file)
            else:
                _refuse_broken_bin(file)
        except OSError as error:
            raise LookupError(f"{file.name} cannot be opened ({error})") from error
    return shapes


def _files(folder: Path) -> dict[Path, str]:
    """Each file -> what names it, in the order in which transformers looks for them.

    Raises:
        LookupError: the index of them is none, with a sentence.
    """
    for name in (SAFETENSORS, BIN):
        if (folder / name).is_file():
            return {folder / name: name}
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            try:
                named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return {folder / each: index.name for each in sorted(named)}
            except NOT_READ as error:
                raise LookupError(f"{index.name} is no index of weights ({type(error).__name__}: {error})") from error
    return {}


def shapes_in(file: Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a safetensors file; its head says how many bytes follow.

    Raises:
        LookupError: it is cut off, or no such file.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as read:
        length = int.from_bytes(read.read(LENGTH), "little")
        if not 0 < length <= LONGEST_HEAD:
            raise LookupError(f"{file.name} has no head of safetensors")
        head = read.read(length) if length <= size - LENGTH else b""
    try:
        tensors = {name: entry for name, entry in json.loads(head or b"{}").items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except NOT_READ as error:
        raise LookupError(f"{file.name} has no head of safetensors ({type(error).__name__}: {error})") from error
    if not head or LENGTH + length + end > size:
        raise LookupError(f"{file.name} is cut off: it has {size} bytes, and its head tells of more. Fetch it again")
    return shapes


def _refuse_broken_bin(file: Path) -> None:
    """
    Raises:
        LookupError: it is none, with a sentence.
        OSError: it cannot be read.
    """
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
