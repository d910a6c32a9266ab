"""A job's config as ``verl.trainer.main_ppo`` composes it, without running anything."""

from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

MAIN, PRIMARY, CONFIG_PATH = "verl.trainer.main_ppo", "ppo_trainer", "config"
"""verl's main module, the config that it starts from, and the folder of the configs, beside it."""


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
        config = Hydra.create_main_hydra2("main_ppo", search_path).compose_config(
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
