"""What is changed in verl on a CPU, each patch on a module in the place of verl's."""

import asyncio
import inspect
from types import ModuleType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.utils import torch_functional
from verl.workers.rollout import llm_server

from verl_padding.errors import PaddingConfigError
from verl_padding.local import verl_patches


class Engine:
    """In the place of verl's."""

    def __init__(self, ranks: int) -> None:
        self.engine_config = SimpleNamespace(ulysses_sequence_parallel_size=ranks)


@pytest.fixture
def registered():
    """The classes that are registered for device cpu, by model type."""
    found = {}

    def register(model_type, backend, device):
        assert (backend, device) == (["fsdp", "fsdp2"], "cpu")
        return lambda engine: found.setdefault(model_type, engine)

    module = SimpleNamespace(
        EngineRegistry=SimpleNamespace(register=register),
        FSDPEngineWithLMHead=Engine,
        FSDPEngineWithValueHead=Engine,
        CPUOffloadPolicy=object,
    )
    verl_patches.register_engines(module)
    return found


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_ranks_that_share_rows_are_refused_where_nothing_exchanges_their_tokens(kind, registered, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    registered[kind](1)
    with pytest.raises(PaddingConfigError, match=r"^ulysses_sequence_parallel_size=2: .* Set it to 1\.$"):
        registered[kind](2)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_: None)  # as tests/engines does
    registered[kind](2)


def test_a_saved_shard_is_a_copy() -> None:
    parameter = torch.ones(3)
    module = ModuleType("fsdp_utils")
    module.fsdp2_sharded_save_to_cpu = lambda model: ({"w": (parameter.detach().cpu(), "spec")}, "global")
    verl_patches.copy_on_sharded_save(module)

    shards, spec = module.fsdp2_sharded_save_to_cpu(None)
    parameter.zero_()

    assert shards["w"][0].tolist() == [1.0, 1.0, 1.0]
    assert (shards["w"][1], spec) == ("spec", "global")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_probs_and_their_gradients_are_verls_to_the_last_bit(dtype, monkeypatch):
    one_by_one = inspect.unwrap(torch_functional.logprobs_from_logits_v2)
    module = SimpleNamespace(logprobs_from_logits_v2=one_by_one)
    monkeypatch.setattr(verl_patches, "TOKENS_AT_ONCE", 3)
    verl_patches.take_log_probs_of_many_tokens(module)
    logits = torch.randn(8, 50, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (8,))
    found, expected = (compute(logits, labels) for compute in (module.logprobs_from_logits_v2, one_by_one))
    assert found.equal(expected)
    assert torch.autograd.grad(found.sum(), logits)[0].equal(torch.autograd.grad(expected.sum(), logits)[0])


class Client:
    """In the place of verl's: its balancer has another server for each turn."""

    turns = 0

    async def _acquire_server(self, request_id, **fields):
        self.turns += 1
        return f"server {self.turns}"

    def _release_server(self, server_id, request_id=None):
        self.turns -= 1


class Manager:
    """In the place of verl's."""

    def __init__(self, client: type[Client], mode: str, servers: list[str], **rollout: str):
        self.client = client
        self.config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}})
        self.rollout_config = OmegaConf.create(rollout)
        self.server_addresses, self.server_handles = servers, [f"handle of {name}" for name in servers]
        self._load_balancer_cls = None

    async def _init_global_load_balancer(self):
        self.global_load_balancer = "balancer"

    def get_client(self):
        return self.client()


@pytest.mark.parametrize(
    ("mode", "servers", "rollout", "taken"),
    [
        ("sync", ["a"], {}, [("a", "handle of a")] * 2),
        ("sync", ["a", "b"], {}, ["server 1", "server 2"]),
        ("colocate_async", ["a"], {}, ["server 1", "server 2"]),
        ("sync", ["a"], {"router_config_path": "mine.yaml"}, ["server 1", "server 2"]),
    ],
)
def test_only_a_job_with_one_server_from_beginning_to_end_has_no_balancer(mode, servers, rollout, taken):
    assert vars(Client).keys() & vars(llm_server.LLMServerClient).keys() >= {"_acquire_server", "_release_server"}
    assert vars(Manager).keys() & vars(llm_server.LLMServerManager).keys() >= {
        "_init_global_load_balancer",
        "get_client",
    }
    client, manager = type("Patched", (Client,), {}), type("Patched", (Manager,), {})
    verl_patches.ask_the_only_server(SimpleNamespace(LLMServerClient=client, LLMServerManager=manager))
    made = manager(client, mode, servers, **rollout)
    asyncio.run(made._init_global_load_balancer())
    asked = made.get_client()
    assert [asyncio.run(asked._acquire_server(f"turn {turn}")) for turn in range(2)] == taken
    asked._release_server("server 2")
    assert asked.turns == (1 if made.global_load_balancer else 0)
