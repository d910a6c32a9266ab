"""The files of the user's own that a job loads, and the settings that name them."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

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
    named = [(setting, OmegaConf.select(config, setting)) for setting in FILES]
    for setting, key in LISTS.items():
        path = OmegaConf.select(config, setting)
        if path and Path(path).is_file():
            named += [(setting, each.rpartition(".")[0]) for each in _values(_loaded(path), key)]
    return {file: setting for setting, name in named if name and (file := _file_of(str(name)))}


def _loaded(path: str) -> object:
    """What a YAML file holds; nothing if it is none, which the run itself reports."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError):
        return None


def _values(held: object, key: str) -> Iterator[str]:
    """Texts by this name, anywhere in a YAML file."""
    if isinstance(held, dict) and isinstance(held.get(key), str):
        yield held[key]
    for value in (
        held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()
    ):
        yield from _values(value, key)


def _file_of(name: str) -> str | None:
    if name.endswith(".py"):
        return str(Path(name.removeprefix("file://")).resolve())
    try:
        spec = find_spec(name.removeprefix("pkg://").replace("/", "."))
    except (ImportError, ValueError):  # which the run itself reports
        return None
    return spec.origin if spec else None
