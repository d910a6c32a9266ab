"""Code of the user's own that a job loads: rewards, agent loops, tools and the like. It is looked for, and not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.doctor.data_files import names_in_column
from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong
from verl_padding.doctor.named_objects import (
    is_module,
    refuse_missing_object,
    refuse_missing_target,
    refuse_other_parameters,
)

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS = f"{AGENT}.agent_loop_config_path"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"

AGENT_COLUMN = "agent_name"
"""Column of the prompts that names the agent loop of each, in place of the default one."""

REWARD = "reward.custom_reward_function"
REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl's reward managers give a reward function, by name."""
OBJECTS = (
    REWARD,
    "data.custom_cls",
    "trainer.v1.sampler.custom_sampler",
    f"{AGENT}.custom_async_server",
)
"""Sections with the ``path`` of a file or module, and the ``name`` of what is taken from it."""

TARGETS = (f"{AGENT}.agent_loop_manager_class", "trainer.checkpoint_callback_class")
"""Settings that are the dotted path of a class."""


def code_of_job(config: DictConfig) -> Iterator[Finding]:
    """The files and modules that the job names are there, and hold what it takes from them."""
    for section in OBJECTS:
        path = OmegaConf.select(config, f"{section}.path")
        name = OmegaConf.select(config, f"{section}.name")
        if path:
            found = _looked_for(f"{section}.path", f"{path} ({name})", partial(refuse_missing_object, path, name))
            if found.verdict == "ok" and section == REWARD and _is_called_by_verl(config):
                look = partial(refuse_other_parameters, path, name, REWARD_ARGUMENTS)
                found = _looked_for(found.subject, f"{path} ({name})", look)
            yield found
    for setting in TARGETS:
        if target := OmegaConf.select(config, setting):
            yield _looked_for(setting, target, partial(refuse_missing_target, target))
    if module := config.actor_rollout_ref.model.get("external_lib"):
        setting = "actor_rollout_ref.model.external_lib"
        there = is_module(module)
        yield ok(setting, module) if there else wrong(setting, f"{module}: there is no such module. Correct the name.")
    yield _reward_manager(config)
    yield from _tools(config)
    yield from _agent_loops(config)


def _is_called_by_verl(config: DictConfig) -> bool:
    """Whether one of verl's reward managers calls the reward function, alone."""
    return config.reward.reward_manager.source == "register" and not config.reward.reward_model.enable


def _reward_manager(config: DictConfig) -> Finding:
    """As verl's ``resolve_reward_manager_cls`` finds it."""
    manager, setting = config.reward.reward_manager, "reward.reward_manager.name"
    if manager.source == "importlib":
        path = manager.module.path
        if not path:
            return wrong(
                "reward.reward_manager.module.path", f"{path}: source=importlib takes the manager from a file. Name it."
            )
        return _looked_for(setting, f"{manager.name}, of {path}", partial(refuse_missing_object, path, manager.name))
    if manager.source != "register":
        return wrong("reward.reward_manager.source", f"{manager.source}: not a choice. Choices: register, importlib.")
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    if manager.name in REWARD_MANAGER:
        return ok(setting, manager.name)
    if config.reward.custom_reward_function.path:
        return not_looked_at(setting, f"{manager.name}: the file of the reward function may register it")
    return wrong(setting, f"{manager.name}: no reward manager of this name. Choices: {', '.join(REWARD_MANAGER)}.")


def _looked_for(setting: str, told: str, look: Callable[[], None]) -> Finding:
    try:
        look()
    except LookupError as problem:
        return wrong(setting, f"{told}: {problem}. Correct the setting, or the file.")
    return ok(setting, told)


def _tools(config: DictConfig) -> Iterator[Finding]:
    setting = f"{MULTI_TURN}.function_tool_path"
    if path := OmegaConf.select(config, setting):
        there = Path(_resolved(path) or path).is_file()
        yield ok(setting, path) if there else wrong(setting, f"{path}: there is no such file. Correct the path.")
    setting = f"{MULTI_TURN}.tool_config_path"
    if path := OmegaConf.select(config, setting):
        try:
            content = _entries(path)
            if not isinstance(content, DictConfig):
                raise LookupError("a mapping with the key `tools` is needed")
            entries = content.get("tools") or ()
            for entry in entries:
                _refuse_bad_entry(entry, "class_name", needed=("class_name", "config"))
        except LookupError as problem:
            yield wrong(setting, f"{path}: {problem}. Correct the setting, or the file.")
        else:
            yield ok(setting, f"{path} ({', '.join(entry.class_name.rpartition('.')[2] for entry in entries)})")


def _agent_loops(config: DictConfig) -> Iterator[Finding]:
    """The loops of the job's file, and whether the loop that it starts is one of these or of verl's."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    known = set(_agent_loop_registry)
    path = OmegaConf.select(config, LOOPS)
    if path:
        try:
            for entry in _entries(path):
                _refuse_bad_entry(entry, "_target_", needed=("name", "_target_"))
                known.add(str(entry.name))
        except LookupError as problem:
            yield wrong(LOOPS, f"{path}: {problem}. Correct the setting, or the file.")
            return
        yield ok(LOOPS, str(path))
    setting = f"{AGENT}.default_agent_loop"
    name = OmegaConf.select(config, setting)
    choices = f"Choices: {', '.join(sorted(known))}. {LOOPS} adds others."
    if name in known:
        yield ok(setting, name)
    else:
        yield wrong(setting, f"{name}: no agent loop of this name. {choices}")
    for path, names in names_in_column(config, AGENT_COLUMN):
        if names - known:
            unknown = ", ".join(sorted(names - known))
            yield wrong("data.train_files", f"{path}: its column {AGENT_COLUMN} names {unknown}. {choices}")


def _resolved(path: str) -> str | None:
    """The file that verl's rollout workers would take for a path."""
    from verl.utils.import_utils import resolve_config_path

    try:
        return str(resolve_config_path(path))
    except FileNotFoundError:
        return None


def _entries(path: str) -> Any:
    """The content of a YAML file, found as verl finds it."""
    found = _resolved(path)
    if found is None or not Path(found).is_file():
        raise LookupError("there is no such file")
    try:
        return OmegaConf.load(found)
    except Exception as error:  # of PyYAML, OmegaConf or the file system
        raise LookupError(f"it cannot be read ({' '.join(str(error).split())})") from error


def _refuse_bad_entry(entry: Any, target: str, *, needed: tuple[str, ...]) -> None:
    if not isinstance(entry, DictConfig) or any(key not in entry for key in needed):
        told = OmegaConf.to_container(entry) if isinstance(entry, DictConfig | ListConfig) else entry
        raise LookupError(f"an entry is {told}, but {' and '.join(needed)} are needed")
    try:
        refuse_missing_target(str(entry[target]))
    except LookupError as problem:
        raise LookupError(f"{target}: {entry[target]}: {problem}") from problem
