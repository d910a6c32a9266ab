"""Entry point in group ``verl.plugins``: loaded by ``import verl`` in every process, Ray workers included.

verl only imports this module and logs a failure at DEBUG, so the module stays light: it leaves a note
for each heavy module of verl or Hydra, and the work is done when (and if) that module is imported.
"""

import logging
import os
from types import ModuleType

from wrapt import register_post_import_hook

logger = logging.getLogger(__name__)


# Whatever fails below, verl must go on as if we were not installed. Who asked for a padded trainer, or for the config
# group, is told by verl ("Unknown trainer 'padded_sync'") or by Hydra; why is told here.


def _register_trainers(_: ModuleType) -> None:
    try:
        import verl_padding.trainer.trainers  # noqa: F401  (registers on import)
    except Exception:
        logger.exception("verl_padding: the padded trainers could not be registered")


def _register_config_group(_: ModuleType) -> None:
    try:
        from hydra.core.plugins import Plugins

        from verl_padding.hydra_search_path import VerlPaddingSearchPath

        Plugins.instance().register(VerlPaddingSearchPath)
    except Exception:
        logger.exception("verl_padding: the config groups could not be put on Hydra's search path")


register_post_import_hook(_register_trainers, "verl.trainer.ppo.v1")
register_post_import_hook(_register_config_group, "hydra")

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from verl_padding.local import registration  # noqa: F401  (leaves its own notes)
