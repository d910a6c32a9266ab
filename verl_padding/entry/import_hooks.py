"""Registers import hooks for heavy modules of verl and Hydra: the work is done if and when a module
is imported."""

import os
from collections.abc import Callable
from types import ModuleType

from wrapt import register_post_import_hook

from verl_padding.entry.plugin_errors import report_failure
from verl_padding.job.vendor import VARIABLE, VENDOR
from verl_padding.version import __version__

Hook = Callable[[ModuleType], None]


def _when_imported(name: str, failure: str) -> Callable[[Hook], Hook]:
    """Registers a hook, whose failure ends a job that asks for padding, and no other."""

    def register(hook: Hook) -> Hook:
        def run(module: ModuleType) -> None:
            try:
                hook(module)
            except Exception:
                report_failure(failure)

        # If the module is there already, wrapt runs the hook at once.
        register_post_import_hook(run, name)
        return run

    return register


@_when_imported("verl.utils.config", "verl's check of a batch's rows could not be turned off")
def _wrap_validate_config(config: ModuleType) -> None:
    from verl_padding.driver.validate_config import wrap_validate_config

    wrap_validate_config(config)


@_when_imported("omegaconf", "the version could not be registered with OmegaConf")
def _register_resolver(omegaconf: ModuleType) -> None:
    omegaconf.OmegaConf.register_new_resolver(
        "verl_padding.version", lambda: __version__, replace=True
    )


@_when_imported("verl.trainer.ppo.v1", "the padded trainers could not be imported")
def _register_trainers(trainers: ModuleType) -> None:
    from verl_padding.driver.stock_guard import pad_or_refuse_in_stock_trainers

    # First: it is needed most if the next line fails.
    pad_or_refuse_in_stock_trainers(trainers.PPOTrainer)
    import verl_padding.driver.trainers  # noqa: F401  (a trainer of a user's own extends them)


@_when_imported(
    "verl.workers.engine.fsdp.transformer_impl", "critics could not be loaded without flash-attn"
)
def _load_critics_by_config(transformer_impl: ModuleType) -> None:
    from verl_padding.verl_fixes.critic_attention import load_critics_by_config

    load_critics_by_config(transformer_impl)


if os.environ.get(VARIABLE) == VENDOR:

    @_when_imported("verl.workers.engine", "the padded engines could not be registered")
    def _register_engines(_: ModuleType) -> None:
        from verl_padding.worker.padded_engine import register_padded_engines

        register_padded_engines()


@_when_imported("hydra", "the config groups could not be put on Hydra's search path")
def _register_config_group(_: ModuleType) -> None:
    from hydra.core.plugins import Plugins

    import verl_padding.configs  # noqa: F401  (Hydra passes a folder over that is not there)
    from verl_padding.entry.hydra_search_path import VerlPaddingSearchPath

    Plugins.instance().register(VerlPaddingSearchPath)


# Not a hook of one module: it patches a dozen of them, each when it is imported.
if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from verl_padding.on_cpu.verl_patches import register

    register()
