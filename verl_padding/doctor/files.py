"""Files and modules that a job names: whether they are here, and have what is asked of them.

Nothing of them is run. What is in the data, ``data.py`` says.
"""

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_padding.doctor.code_names import defined_in, find_module
from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.doctor.keys import leaves
from verl_padding.job.blocker import refuse

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
                wrong(key, f"{module}: there is no such module. {FIX_MODULE}")
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
        yield wrong(RESUMED, f"{step}: no folder of a step. Set it to one, such as {STEP}20.")
    for loop in own_agent_loops(config):
        yield from _class_named(f"{AGENT}.agent_loop_config_path", loop["_target_"])


FIX_MODULE = "Correct it, or start the job where it can be imported."
FIX_PATH = "Correct the path."


def _path(key: str, value: str) -> Iterator[Finding]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if "://" in value or _here(value).exists():
        return
    try:
        validate_repo_id(value)
        is_of_hub = "model" in key and not value.endswith(CONFIG_FILES)
    except HFValidationError:  # a path, such as /models/mine
        is_of_hub = False
    folder = Path(value).parent
    is_of_hub = is_of_hub and (folder == Path() or not folder.is_dir())
    if is_of_hub and isinstance(try_to_load_from_cache(value, "config.json"), str):
        yield ok(key, f"{value}: of the hub, and in this machine's cache")
    elif is_of_hub:
        why = "no folder here, and not in this machine's cache of the hub"
        yield warning(key, f"{value}: {why}. Correct it, unless verl can fetch it.")
    else:
        yield wrong(key, f"{value}: there is nothing of this name here. {FIX_PATH}")


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
        yield wrong(key, f"{value}: there is no such file. {FIX_PATH}")
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
        names = defined_in(file)
    except (SyntaxError, ValueError) as error:  # a zero byte is a ValueError
        yield wrong(key, f"{value}: {error}. Correct the file.")
        return
    if name is not None and names is not None and name not in names:
        given = value if name_key == key else name
        why = f"{given}: {file} does not define {name}"
        yield wrong(name_key, f"{why}. {meant(name, names)}")


def meant(value: str, choices: Collection[str]) -> str:
    """The fix of a name that is none of the choices."""
    if close := get_close_matches(value, choices, n=1):
        return f"Did you mean {close[0]}?"
    return f"Choices: {', '.join(sorted(choices)) or 'none'}."


def own_agent_loops(config: DictConfig) -> list[dict[str, Any]]:
    """Entries of the job's file of agent loops, as verl reads it.

    Raises:
        PaddingConfigError: verl cannot read them.
    """
    key = f"{AGENT}.agent_loop_config_path"
    path = OmegaConf.select(config, key)
    if not path or not _here(path).is_file():  # which is found by its path
        return []
    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(_here(path)), resolve=True)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        refuse(f"{key}={path}", f"cannot be read ({error})", "Correct the file.")
    fix = "Give a list of entries with the texts name and _target_."
    if not isinstance(entries, list):
        refuse(f"{key}={path}", "no list of agent loops", fix)
    for loop in entries:
        if not isinstance(loop, dict) or not all(
            isinstance(loop.get(part), str) for part in ("name", "_target_")
        ):
            refuse(f"{key}={path}", f"{loop} is no agent loop", fix)
    return entries
