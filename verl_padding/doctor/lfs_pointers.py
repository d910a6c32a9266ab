"""Files that Git LFS has left a pointer of: a few lines of text, where a clone without `git lfs pull` has the file."""

from __future__ import annotations

from pathlib import Path

BEGINNING = b"version https://git-lfs"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is such a pointer."""
    try:
        with path.open("rb") as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except OSError:
        return False
