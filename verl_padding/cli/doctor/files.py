"""Files and modules that a job names: whether they are here, and have what is asked of them.

Nothing of them is run. What is in the data, ``data.py`` says.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from verl_padding.cli.doctor.finding import Finding, warning, wrong
from verl_padding.cli.doctor.keys import leaves
from verl_padding.errors import suggestion
from verl_padding.job.composition import settings_of
from verl_padding.job.model_config import OF_HUB
from verl_padding.record.files import as_data_error

AGENT = "actor_rollout_ref.rollout.agent"
WRITTEN, BACKENDS = "save_path", "custom_backend_module"
EXTERNAL_LIB = "external_lib"
TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
RESUMED = "trainer.resume_from_path"


def files_and_modules(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """What is not there, of verl's settings: mandatory ones, files, modules, and names in them."""
    from verl.trainer.ppo.utils import need_critic

    unused = [] if need_critic(config) else ["critic."]
    if config.trainer.resume_mode != "resume_path":
        unused.append(RESUMED)
        if path := config.trainer.resume_from_path:
            why = f"{path}: trainer.resume_mode={config.trainer.resume_mode} does not read it"
            yield warning(RESUMED, f"{why}. Set that to resume_path.")
    known = dict(settings_of(OmegaConf.to_container(verls)))
    settings = {
        key: value
        for key, value in leaves(config).items()
        if key in known and not key.startswith(tuple(unused))
    }
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        name_key = f"{section}.name"
        if value == MISSING:
            yield wrong(key, "not set, and it has no default. Set it.")
        elif not isinstance(value, str) or not value:
            continue
        elif name == "optimizer_impl":
            by = f"{section}.optimizer"
            yield from _class_named(by, f"{value}.{settings[by]}")
        elif name.endswith("_class"):
            yield from _class_named(key, value)
        elif name == BACKENDS:
            yield from _code(key, value, find_module(value), key, None)
        elif name == "path" and name_key in settings:
            module = value.removeprefix("pkg://").replace("/", ".")
            path = Path(value.removeprefix("file://"))
            file = find_module(module) if value.startswith("pkg://") else path
            yield from _code(key, value, file, name_key, settings[name_key])
        elif name != WRITTEN and (name == "path" or name.endswith("_path")):
            yield from _path(key, value)
    for target in own_agent_loops(config).values():
        yield from _class_named(f"{AGENT}.agent_loop_config_path", target)
    for name in _own_tools(config):
        yield from _class_named(TOOLS, name)


FIX_MODULE = "Correct it, or start the job where it can be imported."


def _path(key: str, value: str) -> Iterator[Finding]:
    from huggingface_hub import try_to_load_from_cache

    if "://" in value or _here(value).exists():
        return
    owner = Path(value).parent
    is_here = owner != Path() and owner.is_dir()
    if "model" not in key or is_here or not OF_HUB.fullmatch(value):
        yield wrong(key, f"{value}: no such file or folder. Correct the path.")
    elif not isinstance(try_to_load_from_cache(value, "config.json"), str):
        why = "neither a local folder nor in this machine's cache of the hub"
        yield warning(key, f"{value}: {why}. Correct it, unless verl can fetch it.")


def _here(path: str) -> Path:
    """Where verl finds a file: beside the user, or in its own package."""
    from verl.utils.import_utils import resolve_config_path

    expanded = Path(path).expanduser()
    try:
        return Path(resolve_config_path(str(expanded)))
    except FileNotFoundError:
        return expanded


def _class_named(key: str, value: str) -> Iterator[Finding]:
    module, _, name = value.rpartition(".")
    yield from _code(key, value, find_module(module), key, name)


def _code(
    key: str, value: str, file: Path | None, name_key: str, name: str | None
) -> Iterator[Finding]:
    """A file of a user's code, and a name that verl takes from it."""
    if file is None or not file.exists():
        yield wrong(key, f"{value}: no such file or module. {FIX_MODULE}")
        return
    try:
        words = _words(file)
    except (SyntaxError, ValueError) as error:  # a zero byte is a ValueError
        yield wrong(key, f"{value}: {error}. Correct the file.")
        return
    if name is not None and words and name not in words:
        defined = re.findall(r"^(?:async )?(?:def|class) (\w+)", file.read_text(), re.MULTILINE)
        yield wrong(name_key, f"{name}: {file} does not define it. {suggestion(name, defined)}")


def _words(file: Path) -> set[str]:
    """The words of a module, which names that it defines are among; none where only running it
    would tell."""
    if file.suffix != ".py":
        return set()
    text = file.read_text()
    ast.parse(text, str(file))
    words = set(re.findall(r"\w+", text))
    return set() if "__getattr__" in words or "import *" in text else words


def find_module(name: str) -> Path | None:
    """The file of a module, or the folder of a namespace package, and nothing is imported; None if
    there is none."""
    # find_spec alone imports the packages above a module.
    top, *others = name.split(".")
    spec = find_spec(top) if top else None
    for part in others:
        spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
    if spec is None:
        return None
    folders = spec.submodule_search_locations or ["."]
    return Path(spec.origin if spec.has_location and spec.origin else next(iter(folders)))


def own_agent_loops(config: DictConfig) -> dict[str, str]:
    """Name and class of the entries of the job's file of agent loops, as verl reads it; a
    PaddingDataError if it cannot read them."""
    expected = "a list of agent loops, with strings name and _target_"
    with _yaml_of(config, f"{AGENT}.agent_loop_config_path", expected) as entries:
        return {loop["name"]: f"{loop['_target_']}" for loop in entries or ()}


def _own_tools(config: DictConfig) -> list[str]:
    """Classes of the job's file of tools, which agent loops import as a session begins."""
    expected = "a mapping with a list of tools, each with a string class_name"
    with _yaml_of(config, TOOLS, expected) as entries:
        return [f"{tool['class_name']}" for tool in (entries or {"tools": ()})["tools"]]


@contextmanager
def _yaml_of(config: DictConfig, key: str, expected: str) -> Iterator[Any]:
    """What a YAML file holds that a setting names, None without one; errors of those who read it
    become a PaddingDataError."""
    path = OmegaConf.select(config, key)
    if not path or not _here(path).is_file():  # which is found by its path
        yield None
        return
    with as_data_error(f"{key}={path}", expected, "Correct the file"):
        yield OmegaConf.to_container(OmegaConf.load(_here(path)), resolve=True)
