"""The folders that a job writes to, and the checkpoint that it goes on from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.devices import RAY_INIT, ray_cluster
from verl_padding.doctor.environment import environment_of_job
from verl_padding.doctor.finding import Finding, not_looked_at, ok, warning, wrong
from verl_padding.doctor.models import WEIGHTS, folder_of_model
from verl_padding.job.composition import JobArguments
from verl_padding.job.roles_of_job import has_critic

ACTOR = "actor_rollout_ref.actor"
LOG_FILE = "VERL_FILE_LOGGER_PATH"
LOG_FOLDER = "VERL_FILE_LOGGER_ROOT"
BOARD = "TENSORBOARD_DIR"
CONTENTS = {"optimizer": "optim", "extra": "extra_state"}
"""What FSDP's checkpoints may hold beside the model -> how its files begin."""
RESUME_MODES = ("auto", "disable", "resume_path")
MADE_BY_VERL = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
CHDIR = "hydra.job.chdir"
READ_FROM = (
    "path",
    "train_files",
    "val_files",
    "model_path",
    "tokenizer_path",
    "hf_config_path",
    "lora_adapter_path",
    "agent_loop_config_path",
    "tool_config_path",
    "function_tool_path",
    "resume_from_path",
)
"""Last words of settings that name a file or folder which a job reads."""
RAY_FOLDER = f"{RAY_INIT}._temp_dir"
RAY_FOLDERS = ("RAY_TMPDIR", "TMPDIR")
"""Environment variables with the folder above that of Ray, the first of which counts."""
SOCKET = "session_2000-01-01_00-00-00_000000_{process}/sockets/plasma_store"
"""The longest path in Ray's folder that it cannot do without; {process} is the number of the job's."""
MOST_OF_SOCKET = 107
"""Bytes of the path of a socket, by Linux."""
LONGEST_PROCESS = 7
"""Digits of the number of a process, at most."""


def folders_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether they can be written to. Nothing is made."""
    for setting, findings in (
        ("trainer.default_local_dir", _written),
        ("trainer.default_local_dir", _disk),
        ("trainer.save_freq", _saved_beside),
        ("trainer.resume_mode", _resumed),
        (RAY_FOLDER, _of_ray),
    ):
        try:
            yield from findings(config)
        except OSError as error:
            yield not_looked_at(setting, f"its folder cannot be read here ({error})")


def folder_of_hydra(arguments: JobArguments) -> Iterator[Finding]:
    """Whether Hydra can make the folder that it is told to; nothing of one that is said by other settings."""
    setting = "hydra.run.dir"
    name = _said(arguments, setting)
    if name and not {*"${'\""} & {*name}:
        found = _writable(setting, name, is_folder=True)
        if found.verdict == "wrong":
            yield found


def paths_from_hydras_folder(arguments: JobArguments, config: DictConfig) -> Iterator[Finding]:
    """What the job would no longer find, since Hydra makes it go into a folder of the run's own."""
    if _said(arguments, CHDIR).lower() != "true" or ray_cluster(config):
        return
    for setting, value in _leaves("", OmegaConf.to_container(config, resolve=True)):
        is_path = setting.rpartition(".")[2] in READ_FROM
        if is_path and isinstance(value, str) and not os.path.isabs(value) and os.path.exists(value):
            yield wrong(
                setting,
                f"{value}: with {CHDIR}=true the job looks for it in a folder that Hydra makes for the run. Write the "
                f"whole path ({os.path.abspath(value)}), or leave {CHDIR} out.",
            )


def _said(arguments: JobArguments, setting: str) -> str:
    """What the command line says of one of Hydra's own settings; "" for nothing. The last one counts."""
    said = [override.lstrip("+").partition("=") for override in arguments.overrides]
    return next((value for key, _, value in reversed(said) if key == setting), "")


def _leaves(prefix: str, held: object) -> Iterator[tuple[str, object]]:
    """Values of a config by their settings; those of a list by its own."""
    if isinstance(held, dict):
        for key, value in held.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), value)
    elif isinstance(held, list):
        for value in held:
            yield from _leaves(prefix, value)
    else:
        yield prefix, held


def _written(config: DictConfig) -> Iterator[Finding]:
    trainer = config.trainer
    if trainer.default_local_dir is None and (trainer.resume_mode == "auto" or trainer.save_freq > 0):
        yield wrong(
            "trainer.default_local_dir",
            f"null: verl looks there for a checkpoint (trainer.resume_mode={trainer.resume_mode}) and writes those of "
            f"trainer.save_freq={trainer.save_freq}. Name a folder.",
        )
    for setting in MADE_BY_VERL:
        if name := OmegaConf.select(config, setting):
            yield _writable(setting, str(name), is_folder=True)
    padding = config.get("padding")
    if isinstance(padding, DictConfig) and padding.get("timing") and isinstance(padding.get("timing_dir"), str):
        yield _writable("padding.timing_dir", padding.timing_dir, is_folder=True)
    loggers = [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger or ()
    if "file" in loggers:
        yield _log_file(config)
    if "tensorboard" in loggers:
        yield _writable(BOARD, environment_of_job(config).get(BOARD, "tensorboard_log"), is_folder=True)


def _of_ray(config: DictConfig) -> Iterator[Finding]:
    """The folder of a Ray cluster that the job starts, as Ray finds it."""
    if ray_cluster(config):
        return
    variable = next((name for name in RAY_FOLDERS if name in os.environ), None)
    if named := OmegaConf.select(config, RAY_FOLDER):
        setting, folder, fix = RAY_FOLDER, str(named), f"{RAY_FOLDER}=/tmp/ray"
    elif variable:
        setting, named, fix = variable, os.environ[variable], "export RAY_TMPDIR=/tmp"
        folder = os.path.join(named, "ray")
    else:
        return
    found = _writable(setting, folder, is_folder=True)
    if found.verdict == "wrong":
        yield found
        return
    shortest, longest = (
        len(os.fsencode(os.path.join(folder, SOCKET.format(process="1" * digits)))) for digits in (1, LONGEST_PROCESS)
    )
    if shortest > MOST_OF_SOCKET:
        yield wrong(
            setting,
            f"{named}: too long a path for Ray, which makes sockets below it: theirs would have {shortest} bytes or "
            f"more, and {MOST_OF_SOCKET} are the most. {fix}",
        )
    elif longest > MOST_OF_SOCKET:
        yield warning(
            setting,
            f"{named}: perhaps too long a path for Ray, which makes sockets below it: theirs may have {longest} bytes, "
            f"and {MOST_OF_SOCKET} are the most. {fix}",
        )


def _disk(config: DictConfig) -> Iterator[Finding]:
    """Whether the weights alone would fit; a checkpoint has more."""
    setting = "trainer.default_local_dir"
    model, place = folder_of_model(str(config.actor_rollout_ref.model.path)), str(config.trainer.default_local_dir)
    if config.trainer.save_freq <= 0 or model is None or config.trainer.default_local_dir is None or "://" in place:
        return
    weights = (file for pattern in WEIGHTS for file in model.glob(pattern) if file.is_file())
    needed = sum(file.stat().st_size for file in weights)
    there = next(folder for folder in _with_parents(place) if os.path.exists(folder))
    free = shutil.disk_usage(there).free
    if free < needed:
        yield warning(
            setting,
            f"{place}: its disk has {free / 1e9:.1f} GB left, and the weights alone take {needed / 1e9:.1f} GB. "
            "Name another place, or set trainer.save_freq=-1.",
        )


def _saved_beside(config: DictConfig) -> Iterator[Finding]:
    """Checkpoints that are written beside training: nothing in verl 0.9.1 ends what Megatron-Core has begun, and where
    the actor's are meant to be, its trainer does not note which is the latest, whatever the engine."""
    if config.trainer.save_freq <= 0:
        return
    for section in (ACTOR, "critic") if has_critic(config) else (ACTOR,):
        setting = f"{section}.checkpoint.async_save"
        if not OmegaConf.select(config, setting):
            continue
        if OmegaConf.select(config, f"{section}.strategy") == "megatron":
            yield warning(
                setting,
                "True: verl 0.9.1 never has Megatron-Core finish what it writes then, so no job can go on from a "
                "checkpoint. Set it to False.",
            )
        elif section == ACTOR:
            yield warning(
                setting,
                "True: verl 0.9.1 does not note the latest checkpoint then, so trainer.resume_mode=auto does not find "
                "it. Set it to False.",
            )


def _with_parents(name: str) -> list[Path]:
    place = Path(os.path.expanduser(name)).absolute()  # which leaves ~ where nobody has that name
    return [place, *place.parents]


def _resumed(config: DictConfig) -> Iterator[Finding]:
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode not in RESUME_MODES:
        yield wrong("trainer.resume_mode", f"{mode}: verl resumes in no such way. Choices: {', '.join(RESUME_MODES)}.")
    if mode == "auto" and config.trainer.default_local_dir is not None:
        yield from _latest(config, Path(str(config.trainer.default_local_dir)))
    if mode != "resume_path":
        return
    setting = "trainer.resume_from_path"
    if not isinstance(path, str) or "global_step_" not in path:
        yield wrong(setting, f"{path}: not a checkpoint of verl. Name a folder global_step_<step>.")
    elif not Path(path).is_dir():
        yield wrong(setting, f"{path}: there is no such folder. Correct the path.")
    elif not path.rpartition("global_step_")[2].isdigit():
        yield wrong(setting, f"{path}: its name does not end with the step. Name a folder global_step_<step>.")
    else:
        yield _checkpoint(config, setting, Path(path))


def _checkpoint(config: DictConfig, setting: str, folder: Path) -> Finding:
    """Whether the actor's part is there, for as many ranks as the job has: FSDP cuts its files for these."""
    actor, value = folder / "actor", str(OmegaConf.select(config, setting))
    told = f"{value}:" if folder == Path(value) else f"{value}: {folder.name} in it, from which the job goes on,"
    if not actor.is_dir():
        return wrong(setting, f"{told} has no folder named actor, which verl loads. Name a whole checkpoint.")
    if has_critic(config) and not (folder / "critic").is_dir():
        return wrong(setting, f"{told} has no folder named critic, and the job has one. Name another checkpoint.")
    if config.actor_rollout_ref.actor.strategy.startswith("fsdp"):
        found = re.findall(r"model_world_size_(\d+)_rank_0\.pt", " ".join(map(str, actor.iterdir())))
        ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
        if found and str(ranks) not in found:
            return wrong(
                setting,
                f"{told} is of a job of {found[0]} ranks, and this one has {ranks}. Take as many, or start from its "
                "weights (verl.model_merger).",
            )
        loaded = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.load_contents") or ()
        for content, begins in CONTENTS.items():
            name = f"{begins}_world_size_{ranks}_rank_0.pt"
            if found and content in loaded and not (actor / name).is_file():
                return wrong(
                    "actor_rollout_ref.actor.checkpoint.load_contents",
                    f"{list(loaded)}: {actor} has no {content} ({name}). Leave it out of this list.",
                )
    return ok(setting, str(folder))


def _latest(config: DictConfig, checkpoints: Path) -> Iterator[Finding]:
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
        yield wrong(
            setting,
            f"{checkpoints}: in its {named_in.name}, {text!r} is no step. Write the number of a checkpoint, or remove "
            "the file.",
        )
        return
    if not (checkpoints / f"global_step_{step}").is_dir():
        yield warning(
            setting,
            f"{checkpoints}: its {named_in.name} names step {step}, but there is no global_step_{step}, so the job "
            "begins anew. Write the number of a checkpoint, or remove the file.",
        )
        return
    yield _checkpoint(config, setting, checkpoints / f"global_step_{step}")


def _log_file(config: DictConfig) -> Finding:
    """verl makes the folder of its own file name, but not that of a file which the environment names."""
    environment = environment_of_job(config)
    name = environment.get(LOG_FILE)
    if name is None and config.trainer.project_name is None:
        return wrong("trainer.project_name", "null: verl's file logger makes a folder of this name. Name one.")
    if name is None:
        experiment = str(config.trainer.experiment_name)
        folder = (
            Path(environment.get(LOG_FOLDER, "."), str(config.trainer.project_name), experiment).expanduser().parent
        )
        if "/" in experiment and not folder.is_dir():
            return wrong(
                "trainer.experiment_name",
                f"{experiment}: verl's file logger takes it for a file in a folder that nobody makes. Leave out the /.",
            )
        return _writable(LOG_FOLDER, environment.get(LOG_FOLDER, "."))
    path = Path(name)
    if not path.absolute().parent.is_dir() and not _link_to_nothing(_with_parents(name)):
        return wrong(LOG_FILE, f"{name}: its folder is not there, and verl does not make it. mkdir -p {path.parent}")
    if path.is_dir():
        return wrong(LOG_FILE, f"{name}: is a folder. Name a file.")
    return _writable(LOG_FILE, name)


def _writable(setting: str, name: str, *, is_folder: bool = False) -> Finding:
    if "://" in name:
        return not_looked_at(setting, f"{name}: not on this machine")
    place, *_ = places = _with_parents(name)
    if gone := _link_to_nothing(places):
        return wrong(
            setting,
            f"{name}: {gone} is a link to {os.path.realpath(gone)}, which is not there. Make that folder, or name "
            "another place.",
        )
    there = next(folder for folder in places if os.path.exists(folder))  # False, too, where nobody may look
    if (there != place or is_folder) and not os.path.isdir(there):
        return wrong(setting, f"{name}: {there} is a file. Name another folder.")
    if not os.access(there, os.W_OK):
        return wrong(setting, f"{name}: {there} cannot be written to. Name another place.")
    return ok(setting, name)


def _link_to_nothing(places: Iterable[Path]) -> Path | None:
    """The first of some folders that is a link to a place where nothing is."""
    return next((place for place in places if os.path.islink(place) and not os.path.exists(place)), None)
