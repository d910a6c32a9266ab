"""The folders that a job writes to, and the checkpoint that it goes on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, warning, wrong

LOG_FILE = "VERL_FILE_LOGGER_PATH"
LOG_FOLDER = "VERL_FILE_LOGGER_ROOT"
RESUME_MODES = ("auto", "disable", "resume_path")
MADE_BY_VERL = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")


def folders_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether they can be written to. Nothing is made."""
    for setting in MADE_BY_VERL:
        if name := OmegaConf.select(config, setting):
            yield _writable(setting, str(name), is_folder=True)
    padding = config.get("padding")
    if isinstance(padding, DictConfig) and isinstance(padding.get("timing_dir"), str):
        yield _writable("padding.timing_dir", padding.timing_dir, is_folder=True)
    loggers = config.trainer.logger
    if "file" in ([loggers] if isinstance(loggers, str) else loggers or ()):
        yield _log_file()
    yield from _resumed(config)


def _resumed(config: DictConfig) -> Iterator[Finding]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode not in RESUME_MODES:
        yield wrong("trainer.resume_mode", f"{mode}: verl resumes in no such way. Choices: {', '.join(RESUME_MODES)}.")
    if mode == "auto":
        yield from _latest(Path(str(config.trainer.default_local_dir)))
    if mode != "resume_path":
        return
    setting = "trainer.resume_from_path"
    if not isinstance(path, str) or "global_step_" not in path:
        yield wrong(setting, f"{path}: not a checkpoint of verl. Name a folder global_step_<step>.")
    elif not Path(path).is_dir():
        yield wrong(setting, f"{path}: there is no such folder. Correct the path.")
    else:
        yield ok(setting, path)


def _latest(checkpoints: Path) -> Iterator[Finding]:
    """The checkpoint that verl's file names. Where it is not there, verl begins anew, and says so in one line."""
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

    named_in = Path(get_checkpoint_tracker_filename(str(checkpoints)))
    if not named_in.is_file():
        return
    setting = "trainer.default_local_dir"
    text = named_in.read_text(errors="replace").strip()
    try:
        step = int(text)
    except ValueError:
        yield wrong(setting, f"{named_in}: {text!r} is no step. Write the number of a checkpoint, or remove the file.")
        return
    if not (checkpoints / f"global_step_{step}").is_dir():
        yield warning(
            setting,
            f"{named_in} names step {step}, but there is no global_step_{step}, so the job begins anew. Write the "
            "number of a checkpoint, or remove the file.",
        )


def _log_file() -> Finding:
    """verl makes the folder of its own file name, but not that of a file which the environment names."""
    name = os.environ.get(LOG_FILE)
    if name is None:
        return _writable(LOG_FOLDER, os.environ.get(LOG_FOLDER, "."))
    path = Path(name)
    if not path.absolute().parent.is_dir():
        return wrong(LOG_FILE, f"{name}: its folder is not there, and verl does not make it. mkdir -p {path.parent}")
    if path.is_dir():
        return wrong(LOG_FILE, f"{name}: is a folder. Name a file.")
    return _writable(LOG_FILE, name)


def _writable(setting: str, name: str, *, is_folder: bool = False) -> Finding:
    if "://" in name:
        return not_looked_at(setting, f"{name}: not on this machine")
    place = Path(name).expanduser().absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if (there != place or is_folder) and not there.is_dir():
        return wrong(setting, f"{name}: {there} is a file. Name another folder.")
    if not os.access(there, os.W_OK):
        return wrong(setting, f"{name}: {there} cannot be written to. Name another place.")
    return ok(setting, name)
