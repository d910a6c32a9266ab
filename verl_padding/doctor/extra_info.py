"""Keys of a prompt's ``extra_info`` that code of the user's own cannot do without, and the data has not."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.agent_loops import LOOPS, Loop
from verl_padding.doctor.bound_names import Function, names_bound
from verl_padding.doctor.certain_code import certain_nodes
from verl_padding.doctor.data_files import SETTINGS, files_of, validates
from verl_padding.doctor.finding import Finding, wrong
from verl_padding.doctor.named_objects import file_of
from verl_padding.doctor.rewards import FUNCTION, read_by_verl
from verl_padding.doctor.signatures import class_of_target, defined_in, method
from verl_padding.doctor.tools import MULTI_TURN

COLUMN = "extra_info"
CATCHES_ERRORS = ("limited",)
"""verl's reward managers that score a response 0 if the function fails."""
ADDS_KEYS = ("experimental/agent_loop", "experimental/reward_loop", "trainer/ppo/v1", "workers/rollout")
"""Folders of verl whose code puts more into ``extra_info`` before a reward function has it."""
TOOLS = tuple(f"{MULTI_TURN}.{name}" for name in ("function_tool_path", "tool_config_path"))
"""Settings of tools, which may add keys, too."""


def extra_info_of_job(config: DictConfig, loops: Sequence[Loop], *, asked: bool) -> Iterator[Finding]:
    """What the reward function and the agent loop read, and no row has.

    Args:
        asked: whether the agent loops certainly leave rewards to the function.
    """
    settings = [setting for setting in SETTINGS if setting == "data.train_files" or validates(config)]
    if len(loops) != 1 or config.data.custom_cls.path:
        return
    (loop,) = loops
    told, setting, keys = _of_loop(loop) if not loop.is_verls else _of_reward(config, asked=asked)
    for files in settings if keys else ():
        fields = _fields(config, files)
        if fields is None:
            continue
        for key in sorted(keys - fields):
            if loop.is_verls and _is_word_of_verl(key):
                continue
            yield wrong(
                setting,
                f"{told} reads {COLUMN}[{key!r}], and the rows of {files} have no such key in their extra_info "
                f"({', '.join(sorted(fields)) or 'nothing'}). Add it to the data, or read it with {COLUMN}.get.",
            )
            return


def _of_reward(config: DictConfig, *, asked: bool) -> tuple[str, str, set[str]]:
    """Returns: how to name the reward function, its setting, and what it reads for certain."""
    path, name = (OmegaConf.select(config, f"{FUNCTION}.{key}") for key in ("path", "name"))
    adds = any(OmegaConf.select(config, setting) for setting in TOOLS)
    if not path or not asked or adds or not read_by_verl(config) or config.reward.reward_manager.name in CATCHES_ERRORS:
        return "", "", set()
    try:
        function = defined_in(file_of(path), name)
    except LookupError:  # told with the function
        return "", "", set()
    keys = keys_read(function, COLUMN) if isinstance(function, Function) and _takes(function, COLUMN) else set()
    return f"{path}: {name}()", f"{FUNCTION}.path", keys


def _of_loop(loop: Loop) -> tuple[str, str, set[str]]:
    """The same of an agent loop of the user's own, before whom nobody adds a key."""
    try:
        found = class_of_target(loop.target)
    except LookupError:  # told with the file of loops
        found = None
    run = method(found[1], "run") if found else None
    if run is None:
        return "", "", set()
    names = [COLUMN] if _takes(run, COLUMN) else []
    names += [f"{run.args.kwarg.arg}['{COLUMN}']"] if run.args.kwarg else []
    return f"{loop.target}: run()", LOOPS, {key for name in names for key in keys_read(run, name)}


def _takes(function: Function, name: str) -> bool:
    return any(each.arg == name for each in (*function.args.args, *function.args.kwonlyargs))


def keys_read(function: Function, mapping: str) -> set[str]:
    """Keys that a function takes of a mapping for certain; none if it changes it, or sets its name anew.

    Args:
        mapping: the text of what the mapping is in the function.
    """
    root = mapping.partition("[")[0]
    for node in ast.walk(function):
        if root in names_bound(node):
            return set()
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()) if ast.unparse(node).startswith(mapping):
                return set()
            case ast.Attribute(value=value, attr="setdefault" | "update") if ast.unparse(value) in (mapping, root):
                return set()
            case ast.Subscript() | ast.Attribute() | ast.Compare():
                continue
        if any(ast.unparse(part) in (mapping, root) for part in ast.iter_child_nodes(node) if _is_value(part)):
            return set()  # somebody else gets it, who may add keys
    keys: set[str] = set()
    for node in certain_nodes(function.body):
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                if ast.unparse(node.value) == mapping:
                    keys.add(key)
    return keys


def _is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Subscript)


def _fields(config: DictConfig, setting: str) -> set[str] | None:
    """Keys that any row of some files may have; None if they are not known."""
    from pyarrow import ArrowException, parquet, types

    found: set[str] = set()
    for name in files_of(config, setting):
        path = Path(name).expanduser()
        if "://" in name or path.suffix != ".parquet" or not path.is_file():
            return None
        try:
            schema: Any = parquet.read_schema(path)
        except (OSError, ArrowException):  # told as a file that cannot be read
            return None
        if COLUMN in schema.names:
            kind = schema.field(COLUMN).type
            if not types.is_struct(kind):
                return None
            found |= {field.name for field in kind}
    return found


def _is_word_of_verl(key: str) -> bool:
    """Whether verl's code, or the plug-in's, has the key among its texts: what it adds is nowhere listed."""
    import verl

    import verl_padding

    folders = [Path(verl.__path__[0], folder) for folder in ADDS_KEYS]
    folders.append(Path(verl_padding.__path__[0], "local"))
    return any(f'"{key}"' in file.read_text(errors="replace") for folder in folders for file in folder.rglob("*.py"))
