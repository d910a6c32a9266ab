"""verl's Megatron and VeOmni engines on a CPU: in float32, without CUDA and their kernels.

A process that imports this package gets the hooks below, and ``+local=cpu_megatron`` and
``+local=cpu_veomni`` as choices of Hydra's; workers import it by ``VERL_USE_EXTERNAL_MODULES``.
"""

from pathlib import Path

from wrapt import register_post_import_hook

HOOKS = {
    "verl.workers.engine.megatron.transformer_impl": (
        "tests.support.engines.megatron.engines:register_engines"
    ),
    "verl.workers.engine.veomni.transformer_impl": "tests.support.engines.veomni:register_engines",
}
"""Module of verl -> what its import calls, with that module."""


def _add_configs(_):
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class ConfigsOfEngines(SearchPathPlugin):
        def manipulate_search_path(self, search_path):
            search_path.append(provider="tests", path=f"file://{Path(__file__).parent / 'configs'}")

    Plugins.instance().register(ConfigsOfEngines)


for module, work in HOOKS.items():
    register_post_import_hook(work, module)
register_post_import_hook(_add_configs, "hydra")
