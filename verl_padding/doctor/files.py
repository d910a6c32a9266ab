"""Files and folders that a job names: models, data, code of the user's own. They are looked for, not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_checked, ok, wrong
from verl_padding.doctor.settings import verls_own
from verl_padding.job.roles_of_job import has_critic

MODEL = "actor_rollout_ref.model.path"
DATA = ("data.train_files", "data.val_files")
CODE = (
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "data.custom_cls.path",
    "trainer.v1.sampler.custom_sampler.path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
)
"""Settings with a file of the user's own, or with ``pkg://`` and a module."""


def files_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether each is there; ``verl-padding rehearse`` runs them."""
    for setting in _models(config):
        yield _model(setting, str(OmegaConf.select(config, setting)))
    for setting in DATA:
        value = OmegaConf.select(config, setting)
        for name in value if isinstance(value, ListConfig) else [value]:
            yield _data(setting, str(name))
    for setting in CODE:
        if path := OmegaConf.select(config, setting):
            yield _code(setting, str(path))
    yield from _checkpoint(config)


def _models(config: DictConfig) -> Iterator[str]:
    yield MODEL
    if has_critic(config):
        yield "critic.model.path"
    if config.reward.reward_model.enable:
        yield "reward.reward_model.model_path"


def _model(setting: str, path: str) -> Finding:
    if Path(path).is_dir():
        return ok(setting, path)
    if path.startswith((".", "/")):
        return _absent(setting, path)
    return not_checked(setting, f"{path}: no such folder; verl fetches it when the job starts")


def _data(setting: str, name: str) -> Finding:
    if "://" in name:
        return not_checked(setting, f"{name}: verl copies it when the job starts")
    return ok(setting, name) if glob(os.path.expanduser(name)) else _absent(setting, name)


def _code(setting: str, path: str) -> Finding:
    if path.startswith("pkg://"):
        there = find_spec(path.removeprefix("pkg://").replace("/", ".").split(".")[0]) is not None
    else:
        there = Path(path.removeprefix("file://")).is_file()
    return ok(setting, path) if there else _absent(setting, path)


def _absent(setting: str, path: str) -> Finding:
    of_verl = " It is the value of verl's own config." if OmegaConf.select(verls_own(), setting) == path else ""
    return wrong(setting, f"{path}: there is no such file, folder or module. Correct it.{of_verl}")


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
