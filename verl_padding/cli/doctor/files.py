"""Files and modules that a job names: whether they are here, and have what is asked of them.

Nothing of them is run. What is in the data, ``data.py`` says.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from verl_padding.cli.doctor.finding import Finding, warning, wrong
from verl_padding.cli.doctor.keys import leaves
from verl_padding.errors import PaddingDataError, meant
from verl_padding.job.model_config import OF_HUB
from verl_padding.record.data_errors import as_data_error
from verl_padding.record.files import read_text, read_yaml

AGENT = "actor_rollout_ref.rollout.agent"
WRITTEN = "save_path"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
MODULES = ("external_lib", "custom_backend_module")
"""Names of settings that name modules, for verl to import; it is :data:`EXTERNAL_LIB` that the
doctor imports, too."""
RESUMED, STEP = "trainer.resume_from_path", "global_step_"
CONFIG_FILES = (".yaml", ".yml", ".json", ".py")


def settings_in_use(config: DictConfig) -> dict[str, Any]:
    """Each setting that the job reads, by its full key."""
    from verl.trainer.ppo.utils import need_critic

    unused = [] if need_critic(config) else ["critic."]
    if config.trainer.resume_mode != "resume_path":
        unused.append(RESUMED)
    return {
        key: value for key, value in leaves(config).items() if not key.startswith(tuple(unused))
    }


def files_and_modules(config: DictConfig) -> Iterator[Finding]:
    """What is not there: mandatory settings, files, modules, and names in them."""
    settings = settings_in_use(config)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if value == MISSING:
            yield wrong(key, "not set, and it has no default. Set it.")
        elif not isinstance(value, str | list | ListConfig) or not value:
            continue
        elif name in MODULES and key != EXTERNAL_LIB:
            modules = [value] if isinstance(value, str) else value
            yield from (
                wrong(key, f"{module}: no such module. {FIX_MODULE}")
                for module in modules
                if find_module(module) is None
            )
        elif name == "optimizer_impl":
            by = f"{section}.optimizer"
            yield from _class_named(by, f"{value}.{settings[by]}")
        elif name.endswith("_class"):
            yield from _class_named(key, str(value))
        elif name == "path" and f"{section}.name" in settings:
            yield from code_file(key, str(value), f"{section}.name", settings[f"{section}.name"])
        elif name != WRITTEN and (name == "path" or name.endswith("_path")):
            yield from _path(key, str(value))
    step = settings.get(RESUMED, STEP)
    if STEP not in str(step):
        yield wrong(RESUMED, f"{step}: not the folder of a step. Set it to one, such as {STEP}20.")
    for target in own_agent_loops(config).values():
        yield from _class_named(f"{AGENT}.agent_loop_config_path", target)


FIX_MODULE = "Correct it, or start the job where it can be imported."
FIX_PATH = "Correct the path."


def _path(key: str, value: str) -> Iterator[Finding]:
    from huggingface_hub import try_to_load_from_cache

    if "://" in value or _here(value).exists():
        return
    is_model = "model" in key and not value.endswith(CONFIG_FILES)
    owner = Path(value).parent
    is_here = owner != Path() and owner.is_dir()
    if not is_model or is_here or not OF_HUB.fullmatch(value):
        yield wrong(key, f"{value}: no such file or folder. {FIX_PATH}")
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


def code_file(key: str, value: str, name_key: str, name: str | None) -> Iterator[Finding]:
    """A file, or ``pkg://`` and a module, of a user's code, and a name that verl takes from it."""
    module = value.removeprefix("pkg://").replace("/", ".")
    path = value.removeprefix("file://")
    file = find_module(module) if value.startswith("pkg://") else Path(path)
    if file is None or not file.exists():
        yield wrong(key, f"{value}: no such file. {FIX_PATH}")
    else:
        yield from _names(key, value, file, name_key, name)


def _class_named(key: str, value: str) -> Iterator[Finding]:
    module, _, name = value.rpartition(".")
    file = find_module(module) if module else None
    if file is None:
        yield wrong(key, f"{value}: there is no module {module!r}. {FIX_MODULE}")
    else:
        yield from _names(key, value, file, key, name)


def _names(key: str, value: str, file: Path, name_key: str, name: str | None) -> Iterator[Finding]:
    try:
        words = _words(file)
    except (SyntaxError, ValueError, PaddingDataError) as error:  # a zero byte is a ValueError
        yield wrong(key, f"{value}: {error}. Correct the file.")
        return
    if name is not None and words and name not in words:
        given = value if name_key == key else name
        yield wrong(name_key, f"{given}: {file} does not define {name}. {meant(name, words)}")


def _words(file: Path) -> set[str]:
    """The words of a module, which names that it defines are among; none where only running it
    would tell."""
    if file.suffix != ".py":
        return set()
    text = read_text(file)
    ast.parse(text, str(file))
    words = set(re.findall(r"\w+", text))
    return set() if "__getattr__" in words or "import *" in text else words


def find_module(name: str) -> Path | None:
    """The file of a module, or the folder of a namespace package, and nothing is imported; None if
    there is none."""
    # importlib's find_spec imports the packages above a module.
    where, spec = None, None
    parts = name.split(".")
    for depth in range(len(parts)):
        above = ".".join(parts[: depth + 1])
        found = (finder.find_spec(above, where) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return None
        # A package that is imported may have changed where its modules are.
        where = getattr(sys.modules.get(above), "__path__", spec.submodule_search_locations)
    assert spec is not None
    return Path(spec.origin if spec.has_location and spec.origin else next(iter(where or ["."])))


def own_agent_loops(config: DictConfig) -> dict[str, str]:
    """Name and class of the entries of the job's file of agent loops, as verl reads it; a
    PaddingDataError if it cannot read them."""
    key = f"{AGENT}.agent_loop_config_path"
    path = OmegaConf.select(config, key)
    if not path or not _here(path).is_file():  # which is found by its path
        return {}
    expected = "a list of agent loops, with the texts name and _target_"
    with as_data_error(f"{key}={path}", expected, "Correct the file"):
        entries: Any = OmegaConf.to_container(read_yaml(_here(path)), resolve=True)
        return {loop["name"]: f"{loop['_target_']}" for loop in entries}
