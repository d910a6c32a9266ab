"""The files of the user's own that a job loads, and the settings that name them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

FILES = (
    "data.custom_cls.path",
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "trainer.v1.sampler.custom_sampler.path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "actor_rollout_ref.model.external_lib",
)
LISTS = {
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "_target_",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "class_name",
}
"""Setting of a YAML file -> key in it of a class by its dotted path."""


def own_files(config: DictConfig) -> dict[str, str]:
    """File -> the setting that names it, directly or by a YAML file."""
    return {str(file.resolve()): setting for setting, file in _files(config)}


def _files(config: DictConfig) -> Iterator[tuple[str, Path]]:
    for setting in FILES:
        if named := OmegaConf.select(config, setting):
            yield from ((setting, file) for file in _file_of(str(named)))
    for setting, key in LISTS.items():
        named = OmegaConf.select(config, setting)
        if named and Path(named).is_file():
            for target in _values(OmegaConf.to_container(OmegaConf.load(named)), key):
                yield from ((setting, file) for file in _file_of(target.rpartition(".")[0]))


def _values(held: object, key: str) -> Iterator[str]:
    if isinstance(held, dict):
        for name, value in held.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(held, list):
        for value in held:
            yield from _values(value, key)


def _file_of(named: str) -> Iterator[Path]:
    """The file of a path, or of a module."""
    path = Path(named.removeprefix("file://"))
    if path.suffix == ".py":
        yield path
        return
    try:
        spec = find_spec(named.removeprefix("pkg://").replace("/", "."))
    except (ImportError, ValueError):  # which the run itself reports
        return
    if spec is not None and spec.origin:
        yield Path(spec.origin)
