"""A job's config as ``verl.trainer.main_ppo`` composes it, without running anything."""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_padding.errors import PaddingConfigError

MAIN, PRIMARY, CONFIG_PATH = "verl.trainer.main_ppo", "ppo_trainer", "config"
"""verl's main module, the config that it starts from, and the folder of the configs, beside it."""
REMOTE_CODE = "trust_remote_code"
NAMES_CODE = (
    "_target_",
    "_args_",
    "_partial_",
    REMOTE_CODE,
    "external_lib",
    "custom_backend_module",
)
"""Keys of a config by which code is called that it names, or that comes with a model."""


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """What a job's command line says to Hydra."""

    overrides: tuple[str, ...] = ()
    config_name: str = PRIMARY
    config_path: str = CONFIG_PATH
    """Folder of the primary config: absolute, relative to verl's main module, or ``pkg://`` and a
    package."""
    config_dir: str | None = None
    """One more folder of configs, which comes first."""


def compose_job(arguments: JobArguments) -> DictConfig:
    """verl's config with Hydra overrides, whose values can all be resolved, Hydra's own too; raises
    Hydra's errors."""
    import verl  # noqa: F401  (loads the plug-in, which puts its groups on Hydra's search path)
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import SearchPathException
    from hydra.types import RunMode

    main = find_spec(MAIN)
    assert main is not None
    search_path = create_automatic_config_search_path(main.origin, None, arguments.config_path)
    if arguments.config_dir is not None:
        folder = Path(arguments.config_dir).absolute()
        if not folder.is_dir():
            raise SearchPathException(
                f"--config-dir={arguments.config_dir}: there is no such folder"
            )
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:  # as hydra.main does: Hydra's public way of composing takes no folders
        hydra = Hydra.create_main_hydra2("main_ppo", search_path)
        _check_search_path(hydra.config_loader.repository, arguments)
        config = hydra.compose_config(
            arguments.config_name,
            list(arguments.overrides),
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
    finally:
        GlobalHydra.instance().clear()
    with read_write(config), open_dict(config):
        # As Hydra does when it runs a job. Hydra's values refer to each other, and HydraConfig
        # keeps them for the job.
        HydraConfig.instance().set_config(deepcopy(config))
        config.hydra.runtime.output_dir = str(Path(config.hydra.run.dir).absolute())
        HydraConfig.instance().set_config(deepcopy(config))
        del config.hydra
    OmegaConf.to_container(config, resolve=True)  # a copy, only to see that resolving works
    return config


def _check_search_path(repository: Any, arguments: JobArguments) -> None:
    """Refuses all but folders on the search path of a primary config: Hydra imports packages."""
    primary = repository.load_config(arguments.config_name)
    own = OmegaConf.select(primary.config, "hydra.searchpath") if primary else None
    named = [str(each) for each in own or ()]
    others = [each for each in named if "://" in each and not each.startswith("file://")]
    typed = [part for given in arguments.overrides for part in re.split(r"[\[\],='\"\s]", given)]
    if untyped := [each for each in others if each not in typed]:
        fix = "Set it on the command line if you trust that code"
        raise PaddingConfigError(f"hydra.searchpath={untyped}: a file says so. {fix}.")


def resolved(config: DictConfig) -> DictConfig:
    """A config whose values are those of now: an interpolation may be another one once the
    environment or another setting has changed.

    Raises:
        PaddingConfigError: a value, once it is resolved, is an interpolation.
    """
    values = OmegaConf.to_container(config, resolve=True)
    for setting, value in settings_of(values):
        if isinstance(value, str) and "${" in value:
            why = f"{setting}={value}: still an interpolation once it is resolved"
            raise PaddingConfigError(f"{why}. Set its value.")
    assert isinstance(values, dict)
    made = OmegaConf.create(values)
    OmegaConf.set_struct(made, OmegaConf.is_struct(config))
    return made


def code_named_by_files(config: DictConfig, arguments: JobArguments) -> Iterator[tuple[str, Any]]:
    """Settings by which a config calls code, other than verl's own config does, and the value of
    each, but those that the command line has itself."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = OverridesParser.create().parse_overrides(list(arguments.overrides))
    typed = {override.key_or_group for override in overrides}
    job_config = HydraConfig.instance().cfg
    engine = str(config.get("model_engine", "dp"))
    if not engine.isidentifier():  # Hydra takes a path for a file
        fix = "Set it to a choice of verl's config group: dp, megatron or veomni"
        raise PaddingConfigError(f"model_engine={engine}: not a name. {fix}.")
    stock = compose_job(JobArguments(overrides=(f"model_engine={engine}",)))
    HydraConfig.instance().cfg = job_config
    own = dict(settings_of(OmegaConf.to_container(stock, resolve=True)))
    for setting, value in settings_of(OmegaConf.to_container(config, resolve=True)):
        names_code = setting.rpartition(".")[2] in NAMES_CODE and value
        if names_code and setting not in typed and own.get(setting) != value:
            yield setting, value


def has_files(config_of_hydra: Any, arguments: JobArguments) -> bool:
    """Whether a job's config is also of files that neither verl nor this package brings.

    Args:
        config_of_hydra: Hydra's own section, once the config is composed.
    """
    choices = config_of_hydra.runtime.choices.values()
    return (
        replace(arguments, overrides=()) != JobArguments()
        or bool(config_of_hydra.searchpath)
        or any(".." in str(choice) or Path(str(choice)).is_absolute() for choice in choices)
    )


def settings_of(section: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a section, and of those in it."""
    for key, value in section.items() if isinstance(section, dict) else enumerate(section):
        yield f"{name}{key}", value
        if isinstance(value, dict | list):
            yield from settings_of(value, f"{name}{key}.")
