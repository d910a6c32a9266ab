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
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
KINDS = (".parquet", ".json", ".jsonl")
"""What verl's data set reads."""
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
        yield _model(setting, OmegaConf.select(config, setting))
    for setting in DATA:
        value = OmegaConf.select(config, setting)
        for name in value if isinstance(value, ListConfig) else [value]:
            yield _data(config, setting, str(name))
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
    for name in ("tokenizer_path", "lora_adapter_path"):
        if OmegaConf.select(config, f"actor_rollout_ref.model.{name}"):
            yield f"actor_rollout_ref.model.{name}"


def _model(setting: str, path: object) -> Finding:
    if not isinstance(path, str) or not path:
        return wrong(setting, f"{path}: has to be set.")
    if "://" in path:
        return not_checked(setting, f"{path}: verl copies it when the job starts")
    if path.endswith("/") or path.startswith("~"):
        return wrong(setting, f"{path}: verl takes no path with ~ or with a / at its end. Write the whole path.")
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", "/")) or path.count("/") > 1:
            return _absent(setting, path)
        return _of_hub(setting, path)
    if setting.endswith(("tokenizer_path", "lora_adapter_path")):
        return ok(setting, path)
    if not (folder / "config.json").is_file():
        return wrong(setting, f"{path}: the folder has no config.json. Name a model's folder.")
    if not any(file.is_file() for pattern in WEIGHTS for file in folder.glob(pattern)):
        return wrong(setting, f"{path}: the folder has no weights ({', '.join(WEIGHTS)}). Name a whole model.")
    return ok(setting, path)


def _of_hub(setting: str, name: str) -> Finding:
    """Looked for in the hub's cache only: the hub itself answers when the job starts."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ok(setting, f"{name}, in the hub's cache")
    if constants.HF_HUB_OFFLINE:
        return wrong(
            setting,
            f"{name}: no such folder, and not in the hub's cache, with HF_HUB_OFFLINE set. Correct the path, or fetch "
            "the model first.",
        )
    return not_checked(setting, f"{name}: no such folder; verl asks the hub for it when the job starts")


def _data(config: DictConfig, setting: str, name: str) -> Finding:
    if "://" in name:
        return not_checked(setting, f"{name}: verl copies it when the job starts")
    own_data_set = bool(config.data.custom_cls.path)
    files = glob(os.path.expanduser(name) if own_data_set else name)
    if not files:
        return _absent(setting, name)
    if not own_data_set and Path(name).suffix not in KINDS:  # by which verl chooses how to read all of a pattern
        return wrong(setting, f"{name}: verl's data set reads {', '.join(KINDS)} only. Name such files.")
    return ok(setting, name)


def _absent(setting: str, path: str) -> Finding:
    if OmegaConf.select(verls_own(), setting) == path:
        return wrong(setting, f"{path}: is the value of verl's own config, and not here. Name yours.")
    return wrong(setting, f"{path}: there is no such file or folder. Correct the path.")


def _code(setting: str, path: str) -> Finding:
    if path.startswith("pkg://"):
        module = path.removeprefix("pkg://").replace("/", ".")
        there = find_spec(module.split(".")[0]) is not None
        return (
            ok(setting, path) if there else wrong(setting, f"{path}: there is no such module. Install or correct it.")
        )
    if not Path(path.removeprefix("file://")).is_file():
        return wrong(setting, f"{path}: there is no such file. Correct the path.")
    return ok(setting, path)


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
