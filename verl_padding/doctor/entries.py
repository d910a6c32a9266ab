"""YAML files of entries, agent loops or tools, which verl's workers read: found and checked as they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_padding.doctor.named_objects import refuse_missing_target


def resolved(path: str) -> str | None:
    """The file that verl's rollout workers would take for a path."""
    from verl.utils.import_utils import resolve_config_path

    try:
        return str(resolve_config_path(path))
    except FileNotFoundError:
        return None


def entries_of(path: str) -> Any:
    """The content of a YAML file, found as verl finds it.

    Raises:
        LookupError: there is none, with a sentence.
    """
    found = resolved(path)
    if found is None or not Path(found).is_file():
        raise LookupError("there is no such file")
    try:
        return OmegaConf.load(found)
    except Exception as error:  # of PyYAML, OmegaConf or the file system
        raise LookupError(f"it cannot be read ({' '.join(str(error).split())})") from error


def refuse_missing_keys(entry: Any, *needed: str) -> None:
    """
    Raises:
        LookupError: an entry is without one of some keys, with a sentence.
    """
    if not isinstance(entry, DictConfig) or any(key not in entry for key in needed):
        told = OmegaConf.to_container(entry) if isinstance(entry, DictConfig | ListConfig) else entry
        raise LookupError(f"an entry is {told}, but {' and '.join(needed)} are needed")


def refuse_bad_entry(entry: Any, target: str, *, needed: tuple[str, ...]) -> None:
    """Looks whether an entry has some keys, and the class or function that one of them names is there.

    Raises:
        LookupError: it is not so, with a sentence.
    """
    refuse_missing_keys(entry, *needed)
    try:
        named = str(entry[target])
    except OmegaConfBaseException:  # a reference to what the workers may have, and this machine has not
        return
    try:
        refuse_missing_target(named)
    except LookupError as problem:
        raise LookupError(f"{target}: {named}: {problem}") from problem
