"""Files and folders that a job names: models, data, code of the user's own. They are looked for, not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_checked, ok, wrong
from verl_padding.job.roles_of_job import has_critic
from verl_padding.rehearsal.own_files import FILES, LISTS

MODEL = "actor_rollout_ref.model.path"
DATA = ("data.train_files", "data.val_files")


def files_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether each is there; ``verl-padding rehearse`` runs them."""
    models = [MODEL]
    models += ["critic.model.path"] if has_critic(config) else []
    models += ["reward.reward_model.model_path"] if config.reward.reward_model.enable else []
    for setting in (*models, *DATA, *FILES, *LISTS):
        value = OmegaConf.select(config, setting)
        for name in value if isinstance(value, ListConfig) else [value]:
            if setting in (*models, *DATA):
                yield _model_or_data(setting, str(name), is_model=setting in models)
            elif name:
                yield _found(setting, str(name), is_there=_is_code(str(name)))
    yield from _checkpoint(config)


def _model_or_data(setting: str, name: str, *, is_model: bool) -> Finding:
    there = Path(name).is_dir() if is_model else bool(glob(os.path.expanduser(name)))
    if not there and ("://" in name or (is_model and not name.startswith((".", "/")))):
        return not_checked(setting, f"{name}: not here; verl fetches it when the job starts")
    return _found(setting, name, is_there=there)


def _found(setting: str, name: str, *, is_there: bool) -> Finding:
    if is_there:
        return ok(setting, name)
    return wrong(setting, f"{name}: there is no such file, folder or module. Correct it.")


def _is_code(name: str) -> bool:
    path = Path(name.removeprefix("file://"))
    if path.suffix in (".py", ".yaml", ".yml", ".json"):
        return path.is_file()
    return find_spec(name.removeprefix("pkg://").replace("/", ".").split(".")[0]) is not None


def _checkpoint(config: DictConfig) -> Iterator[Finding]:
    """What verl passes over in silence: a folder that it resumes from, and whose latest checkpoint is not there."""
    folder = Path(str(config.trainer.default_local_dir))
    latest = folder / "latest_checkpointed_iteration.txt"
    if config.trainer.resume_mode == "auto" and latest.is_file():
        step = folder / f"global_step_{latest.read_text().strip()}"
        if not step.is_dir():
            yield wrong(
                "trainer.resume_mode",
                f"auto: {latest} names {step.name}, which is not there: verl would begin anew. Correct the file, or "
                "set trainer.resume_mode=disable.",
            )
