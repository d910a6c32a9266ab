"""The folder of a demo: files of an earlier demo are replaced, and what anyone else put there is never touched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_padding.errors import PaddingDataError
from verl_padding.local.launch import LOG
from verl_padding.runs.report import METRICS, ROLLOUTS

PICTURE = "reward.png"
ASSETS = "assets"
HYDRA = "hydra"
TIMING = "timing"
MADE = (ASSETS, HYDRA, ROLLOUTS, TIMING, PICTURE, METRICS, LOG)
"""All that a demo makes in its folder, besides the list."""
LIST = ".verl_padding_demo.json"
"""Lists what is in a demo's places when it ends, however it ends: files, and folders with a slash."""
FEW = 3


@contextmanager
def demo_folder(out: Path) -> Iterator[Path]:
    """A folder for one demo: new, empty, or that of an earlier demo, whose files are removed from it.

    Only what an earlier demo has put on its list, as it ended, is removed. What anyone has put beside it since then
    stays.

    Yields: the folder, as an absolute path.

    Raises:
        PaddingDataError: it cannot be a folder, it holds something and no list of a demo, or a place of the demo holds
            something that is not on the list. Nothing has been removed then.
    """
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        first = min(out.iterdir(), default=None)
    except OSError as error:
        raise PaddingDataError(f"--out={out}: cannot be made a folder ({error.strerror}). Name another.") from error
    if first is not None and not os.path.lexists(out / LIST):
        raise PaddingDataError(
            f"--out={out}: holds {first.name}, and no demo has run there. Name a new folder, an empty one, or that of "
            "an earlier demo."
        )
    found, listed = _entries(out), _listed(out)
    if foreign := _innermost(found - listed):
        names = ", ".join(foreign[:FEW]) + (f" and {len(foreign) - FEW} more" if len(foreign) > FEW else "")
        raise PaddingDataError(
            f"--out={out}: holds {names} where the demo puts its own files, and no demo has listed that as its "
            "own. Move it away, or name another folder."
        )
    try:
        for entry in sorted(found, reverse=True):  # what is in a folder before the folder
            if entry.endswith("/"):
                (out / entry).rmdir()
            else:
                (out / entry).unlink()
        _write_list(out)
    except OSError as error:
        raise PaddingDataError(f"--out={out}: cannot be written ({error.strerror}). Name another folder.") from error
    try:
        yield out
    finally:
        _write_list(out)


def _entries(out: Path) -> set[str]:
    """Paths below `out` of all that is in a demo's places; those of folders end in a slash, and links are files."""
    entries = set()
    for name in MADE:
        place = out / name
        if place.is_dir() and not place.is_symlink():
            for folder, folders, files in os.walk(place):
                inside = Path(folder)
                entries.add(f"{inside.relative_to(out).as_posix()}/")
                links = [inner for inner in folders if (inside / inner).is_symlink()]
                entries |= {(inside / inner).relative_to(out).as_posix() for inner in [*files, *links]}
        elif os.path.lexists(place):
            entries.add(name)
    return entries


def _innermost(entries: set[str]) -> list[str]:
    """The entries in order, without folders that hold other entries."""
    holding = {f"{parent.as_posix()}/" for entry in entries for parent in Path(entry).parents}
    return sorted(entries - holding)


def _listed(out: Path) -> set[str]:
    try:
        return set(json.loads((out / LIST).read_text())["made"])
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PaddingDataError(
            f"--out={out}: its {LIST} is not the list of a demo ({error!r}), so its files may be anyone's. Name "
            "another folder."
        ) from error


def _write_list(out: Path) -> None:
    (out / LIST).write_text(json.dumps({"made": sorted(_entries(out))}, indent=1) + "\n")
