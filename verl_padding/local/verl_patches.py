"""What is changed in verl 0.9 on a CPU, or registered with it.

Each function is called once, with the verl module it changes, right after that module's import. A name that
verl no longer has ends the import with an AttributeError: better than training on something else.
"""

import random
from functools import partial, partialmethod, wraps
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, cast

import torch

from verl_padding.errors import PaddingConfigError

ROLLOUT_NAME = "transformers"
"""Value of ``actor_rollout_ref.rollout.name``."""
FIRST_PORT, LAST_PORT = 20_000, 32_767
"""Above the ports that ``ray start`` keeps for its workers (10002 to 19999), below those that Linux (32768 and up) and
macOS (49152 and up) give away."""
POLL_INTERVAL_S = 0.1
TOKENS_AT_ONCE = 256
"""Whose log-probs are computed together."""


def register_engines(transformer_impl: Any) -> None:
    """Registers verl's FSDP engine classes for device "cpu" (verl registers them for cuda and npu).

    Reference policies ask for ``CPUOffloadPolicy(pin_memory=True)``, and pinning needs an accelerator. Their
    parameters are in CPU memory anyway, so no offload policy is used at all.
    """
    for model_type, engine in {
        "language_model": transformer_impl.FSDPEngineWithLMHead,
        "value_model": transformer_impl.FSDPEngineWithValueHead,
    }.items():
        on_cpu = type(f"{engine.__name__}OnCpu", (_OnCpu, engine), {})
        transformer_impl.EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(on_cpu)
    transformer_impl.CPUOffloadPolicy = lambda **_: None


class _OnCpu:
    """Mixin before one of verl's FSDP engines: packed rows are attended to one by one.

    verl exchanges the tokens of shared rows around flash attention alone, which has no CPU kernels: each rank would
    silently attend to its own part of a row.
    """

    engine_config: Any

    def __init__(self, *args: Any, **kwargs: Any):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from verl_padding.local.row_attention import attend_row_by_row

        super().__init__(*args, **kwargs)
        if ALL_ATTENTION_FUNCTIONS["sdpa"] not in (sdpa_attention_forward, attend_row_by_row):
            return
        ranks = self.engine_config.ulysses_sequence_parallel_size
        if ranks > 1:
            raise PaddingConfigError(
                f"ulysses_sequence_parallel_size={ranks}: attention on a CPU does not support Ulysses. Set it to 1."
            )
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend_row_by_row


def honour_attention_of_value_models(model: Any) -> None:
    """Lets the config choose the attention of a critic: verl hard-codes flash_attention_2."""

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    model.load_valuehead_model = wraps(model.load_valuehead_model)(load)


def copy_on_sharded_save(fsdp_utils: Any) -> None:
    """Makes ``fsdp2_sharded_save_to_cpu`` save a copy.

    verl's function relies on ``.cpu()`` to copy, but on a CPU that returns the live parameter itself: separate_async
    would silently restore the policy that it has just trained instead of the old one.
    """
    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def save_copy(model: Any) -> Any:
        shards, global_spec = save(model)
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, global_spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = save_copy


def use_one_gloo_backend(distributed: Any) -> None:
    """verl asks for "cpu:gloo,<device>:<backend>", which names a CPU twice, and torch refuses it."""
    start = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(start, backend="cpu:gloo")


def keep_rendezvous_port_free(ray_base: ModuleType) -> None:
    """Has the ranks of a group connect at a port that nothing else is given.

    verl asks the system for a free port, gives it back, and starts the workers. Until the first of them listens there,
    seconds later, the system may give it to a connection of Ray or TransferQueue ("Ping failed, invalid value returned
    from server"). verl takes the first free port of a range; each group's begins elsewhere, which no seed repeats.
    """
    init = ray_base.RayWorkerGroup.__init__

    @wraps(init)
    def init_with_range(self: Any, *args: Any, **kwargs: Any) -> None:
        first = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT - 1_000)
        init(self, *args, **{"master_port_range": [first, LAST_PORT + 1]} | kwargs)

    ray_base.RayWorkerGroup.__init__ = init_with_range


def poll_often(replay_buffer: ModuleType) -> None:
    """The trainer looks for finished prompts every 2 s by default, which is most of a step on a toy model."""
    buffer = replay_buffer.ReplayBuffer
    buffer.__init__ = partialmethod(buffer.__init__, poll_interval=POLL_INTERVAL_S)


def take_log_probs_of_many_tokens(torch_functional: Any) -> None:
    """Without flash attention, verl computes the log-probs of one token after the other, in a loop of Python."""
    token_by_token = torch_functional.logprobs_from_logits_v2

    @wraps(token_by_token)
    def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.dtype not in (torch.float32, torch.float64):
            return cast(torch.Tensor, token_by_token(logits, labels))
        chosen = logits.gather(-1, labels[..., None])[..., 0]
        # In parts, since the exponentials of a part are as large as its logits.
        return chosen - torch.cat([part.logsumexp(-1) for part in logits.split(TOKENS_AT_ONCE)])

    torch_functional.logprobs_from_logits_v2 = log_probs


def ask_the_only_server(llm_server: Any) -> None:
    """A rollout of one server, which is there from beginning to end, has no load balancer to ask for it at each turn.

    That is a process less, two calls of Ray a turn, and a handle to unpickle. The servers of asynchronous trainers come
    and go, and a user's own balancer may do more than to choose.
    """
    client, manager = llm_server.LLMServerClient, llm_server.LLMServerManager
    acquire, release = client._acquire_server, client._release_server
    start_balancer, get_client = manager._init_global_load_balancer, manager.get_client

    async def init_global_load_balancer(self: Any) -> None:
        is_verls = self._load_balancer_cls is None and self.rollout_config.get("router_config_path") is None
        is_sync = self.config.trainer.v1.trainer_mode == "sync"
        if is_verls and is_sync and len(self.server_handles) == 1:
            self.global_load_balancer = None
        else:
            await start_balancer(self)

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = get_client(self, *args, **kwargs)
        if self.global_load_balancer is None:
            made.only_server = self.server_addresses[0], self.server_handles[0]
        return made

    async def acquire_server(self: Any, request_id: str, **fields: Any) -> Any:
        return getattr(self, "only_server", None) or await acquire(self, request_id, **fields)

    def release_server(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "only_server"):
            release(self, *args, **kwargs)

    manager._init_global_load_balancer, manager.get_client = init_global_load_balancer, get
    client._acquire_server, client._release_server = acquire_server, release_server


def register_adapter(rollout: ModuleType) -> None:
    """The worker's side of the rollout, in ``verl.workers.rollout.base``: verl has a plain dict for it."""
    rollout._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "verl_padding.local.rollout_replica.TransformersAdapter"


def register_replicas(replica: ModuleType) -> None:
    """The server's side of the rollout by transformers, and a vLLM that replaces verl's own."""
    for name, place in {
        ROLLOUT_NAME: "rollout_replica:TransformersReplica",
        "vllm": "vllm_replica:CpuVllmReplica",
    }.items():
        replica.RolloutReplicaRegistry.register(name, partial(resolve_name, f"verl_padding.local.{place}"))
