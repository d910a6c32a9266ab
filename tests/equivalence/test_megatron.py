"""Zero effect on verl's Megatron engine: padded ranks of each shape end with the weights of one rank without pads.

That rank is one of FSDP2, which computes the model of Hugging Face. Where routes are replayed or values computed, it is
one of Megatron: FSDP2 replays no routes, and a critic of Megatron draws its own head.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import AutoConfig, AutoModelForCausalLM
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.utils.padding import response_from_nested

from tests.equivalence.test_actor_update import BUDGETS, assert_metrics_agree
from tests.equivalence.test_critic_update import assert_critic_metrics_agree
from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGET,
    LENGTHS,
    PACKERS,
    PAD_TOKENS,
    assert_cut_as_told,
    call,
    pad_tokens_of,
    put_few_rows,
    put_trained_rows,
    update_both_with,
    with_trained_fields,
)
from tests.support.fsdp2_workers import (
    empty_queue,
    give_same_head,
    padded_and_plain,
    start_actor,
    start_critic,
    start_over,
    stop,
)
from tests.support.padded_rows import upsample
from tests.support.rows_in_queue import PARTITION, put_rows
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.template import PadTemplate
from verl_padding.patches.plan_packer import install
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Update, plan_batch
from verl_padding.trainer.losses import wrap_worker_loss
from verl_padding.trainer.worker_calls import PaddedWorkerGroup

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]

NO_DECAY = "actor_rollout_ref.actor.optim.weight_decay=0"
"""Megatron leaves norms and biases out of it."""
ON_FSDP2 = (*ALL_TERMS, NO_DECAY)
TERMS = (
    "+local=cpu_megatron",
    *ALL_TERMS[:-1],  # all but the setting of its optimizer
    "+actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps=1e-5",
    NO_DECAY,
)
ON_MEGATRON = (*TERMS, *BUDGETS)
REPLAYS = "actor_rollout_ref.actor.megatron.router_replay.mode={}"
PER_TOKEN = "+actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss=true"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Ranks, and how many of them share what."""

    ranks: int = 2
    pipeline_model: int = 1
    virtual_pipeline_model: int = 1
    tensor_model: int = 1
    context: int = 1
    expert_model: int = 1

    @property
    def dp_size(self) -> int:
        return self.ranks // (self.pipeline_model * self.tensor_model * self.context)

    @property
    def micro_batch_multiple(self) -> int:
        return self.pipeline_model if self.virtual_pipeline_model > 1 else 1

    def settings(self, role: str = "actor_rollout_ref.actor") -> list[str]:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ranks"}
        settings = [f"{role}.megatron.{name}_parallel_size={size}" for name, size in sizes.items() if size > 1]
        whole_experts = f"{role}.megatron.expert_tensor_parallel_size=1"
        return [*settings, whole_experts] if self.expert_model > 1 else settings

    @property
    def template(self) -> PadTemplate:
        """Of pads as long as the engine asks."""
        length = pad_tokens_of("+local=cpu_megatron", *self.settings())
        return PadTemplate(eos_token_id=3, length=length, n_experts=lambda: EXPERTS)


SHAPES = {
    "dp2": Shape(),
    "pp2": Shape(pipeline_model=2),
    "pp2 vpp2": Shape(pipeline_model=2, virtual_pipeline_model=2),
    "tp2": Shape(tensor_model=2),
    "cp2": Shape(context=2),
    "pp2 x dp2": Shape(ranks=4, pipeline_model=2),
    "tp2 x dp2": Shape(ranks=4, tensor_model=2),
    "cp2 x dp2": Shape(ranks=4, context=2),
    "tp2 x cp2": Shape(ranks=4, tensor_model=2, context=2),
}
LAYERS = 4
"""One for each part of a virtual pipeline, of two parts on each of two ranks."""
MIXTURES = {
    "dp2": Shape(),
    "pp2": Shape(pipeline_model=2),
    "pp2 vpp2": Shape(pipeline_model=2, virtual_pipeline_model=2),
    "tp2": Shape(tensor_model=2),
    "cp2": Shape(context=2),
    "pp2 x dp2": Shape(ranks=4, pipeline_model=2),
    "cp2 x dp2": Shape(ranks=4, context=2),
    "ep2": Shape(expert_model=2),
    # Ranks that share a row's tensors also cut its tokens among them (sequence parallel), and send those to experts.
    "tp2 with ep2": Shape(tensor_model=2, expert_model=2),
    "tp2 with ep2, twice": Shape(ranks=4, tensor_model=2, expert_model=2),
}
EXPERTS, TOP_K = 4, 2
ODD_VOCABULARY = 261
"""A vocabulary that two tensor parallel ranks cannot share as it is."""


def test_pads_are_as_long_as_each_shape_asks():
    asked = {name: shape.template.length for name, shape in (SHAPES | MIXTURES).items()}
    more = {name: length for name, length in asked.items() if length > PAD_TOKENS}
    assert more == {"cp2": 4, "cp2 x dp2": 4, "tp2 x cp2": 8}


def with_shared_heads(folder: Path, vocab_size: int = 320, **changes: Any) -> Path:
    """The tiny model of a folder, with heads and a vocabulary that two tensor parallel ranks can share."""
    config = AutoConfig.from_pretrained(folder, num_key_value_heads=2, vocab_size=vocab_size, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With layers for a virtual pipeline."""
    folder = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    return with_shared_heads(folder, num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """As many, for the same."""
    folder = make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("mixture"))
    return with_shared_heads(folder, num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS)


@contextmanager
def started(workers: RayWorkerGroup, *, padded: bool = False) -> Iterator[RayWorkerGroup]:
    """Workers that are ended with the block."""
    try:
        if padded:
            workers.execute_with_func_generator(wrap_worker_loss("rows"))
        yield workers
    finally:
        stop(workers)
        empty_queue()


@pytest.fixture(scope="module")
def one_rank(transfer_queue, model) -> Iterator[RayWorkerGroup]:
    """A rank that sees no pads, of FSDP2."""
    with started(start_actor(model, 1, *ON_FSDP2)) as rank:
        yield rank


@pytest.fixture(scope="module")
def one_rank_of_mixture(transfer_queue, mixture) -> Iterator[RayWorkerGroup]:
    with started(start_actor(mixture, 1, *ON_FSDP2)) as rank:
        yield rank


@pytest.fixture(scope="module", params=SHAPES)
def actors(request, transfer_queue, model, one_rank) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, Shape]]:
    shape = SHAPES[request.param]
    with started(start_actor(model, shape.ranks, *ON_MEGATRON, *shape.settings()), padded=True) as padded_ranks:
        yield padded_ranks, one_rank, shape


def plan_for(
    batch: KVBatchMeta,
    packer: str,
    shape: Shape,
    prompts: int = 6,
    micro_batch_rows: int | None = None,
    update: str = "actor",
) -> BatchPlan:
    """Three mini-batches; and, by a token budget, a pass."""
    sizes: dict[str, Any] = {"dp_size": shape.dp_size, "micro_batch_multiple": shape.micro_batch_multiple}
    if micro_batch_rows is None:
        sizes["token_budget"] = BUDGET * shape.context
    else:
        sizes["micro_batch_rows"] = micro_batch_rows
    job = Job(
        strategy="prompt",
        prompts=prompts,
        sessions_per_prompt=2,
        updates={update: Update(**sizes, prompts_per_mini_batch=prompts // 3)},
        inference={"log_prob": Pass(**sizes)} if micro_batch_rows is None else {},
        packer=packer,
        pad_tokens=shape.template.length,
    )
    plan = plan_batch(Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags]), job)
    assert plan.layouts[update].n_mini_batches == 3
    return plan


def start_both_over(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, mode: str, packer: str, micro_batch_rows: int | None = None
) -> None:
    start_over(one_rank, mode)
    start_over(padded_ranks, mode, micro_batch_rows)
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, packer, actors):
    padded_ranks, one_rank, shape = actors
    start_both_over(padded_ranks, one_rank, mode, packer)
    batch = put_trained_rows()
    both = update_both_with(padded_ranks, one_rank, batch, plan_for(batch, packer, shape), shape.template)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer)


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_ranks_with_micro_batches_of_fixed_size(packer, actors):
    padded_ranks, one_rank, shape = actors
    start_both_over(padded_ranks, one_rank, "seq-mean-token-mean", packer, micro_batch_rows=2)
    batch = put_trained_rows()
    plan = plan_for(batch, packer, shape, micro_batch_rows=2)
    assert plan.layouts["actor"].rows_per_cell % (2 * shape.micro_batch_multiple) == 0
    both = update_both_with(padded_ranks, one_rank, batch, plan, shape.template)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer, 2)


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_ranks_of_which_some_hold_pads_alone(packer, actors):
    padded_ranks, one_rank, shape = actors
    if shape.dp_size == 1:
        pytest.skip("its ranks share every row")
    start_both_over(padded_ranks, one_rank, "seq-mean-token-mean", packer)
    assert_agrees_where_some_hold_pads_alone(padded_ranks, one_rank, packer, shape, put_few_rows())


def assert_agrees_where_some_hold_pads_alone(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, packer: str, shape: Shape, batch: KVBatchMeta
) -> None:
    plan = plan_of_idle_ranks(batch, packer, shape, "actor")
    both = update_both_with(padded_ranks, one_rank, batch, plan, shape.template)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer)


def plan_of_idle_ranks(batch: KVBatchMeta, packer: str, shape: Shape, update: str) -> BatchPlan:
    plan = plan_for(batch, packer, shape, prompts=3, update=update)
    assert plan.layouts[update].reporting_ranks_M == (1, 1, 2), "one group of ranks was meant to hold pads alone"
    return plan


# With context parallelism, verl drops the fraction of a token that each rank would have of a micro-batch: lengths are
# even here (docs/limits.md).
EVEN_LENGTHS = [(prompt, response + (prompt + response) % 2) for prompt, response in LENGTHS]


@pytest.mark.parametrize("shape", [Shape(), Shape(context=2), Shape(tensor_model=2)], ids=["dp2", "cp2", "tp2"])
def test_so_do_ranks_whose_gradients_megatron_divides_by_their_tokens(shape, transfer_queue, model, one_rank):
    # Megatron-Bridge turns it on with context parallelism: a loss times all tokens, then gradients over all tokens,
    # and those of pads are among both.
    with started(start_actor(model, shape.ranks, *ON_MEGATRON, *shape.settings(), PER_TOKEN), padded=True) as padded:
        padded.execute_with_func_generator(assert_divides_by_tokens)
        start_both_over(padded, one_rank, "token-mean", "verl")
        batch = with_trained_fields(put_rows(EVEN_LENGTHS), torch.Generator().manual_seed(0))
        assert_metrics_agree(update_both_with(padded, one_rank, batch, plan_for(batch, "verl", shape), shape.template))


def assert_divides_by_tokens(worker: Any) -> DataProto:
    assert worker.actor.engine.tf_config.calculate_per_token_loss
    return DataProto()


def test_so_do_ranks_whose_vocabulary_is_padded(transfer_queue, tmp_path):
    model = with_shared_heads(make_tiny_model("qwen2", tmp_path), vocab_size=ODD_VOCABULARY)
    padding = "actor_rollout_ref.model.external_lib=tests.support.padded_vocabulary"
    shape = SHAPES["tp2"]
    with padded_and_plain(start_actor, model, *TERMS, padding, padded=[*BUDGETS, *shape.settings()]) as both:
        for workers in both:
            workers.execute_with_func_generator(assert_pads_vocabulary)
        for rows, packer in product((None, 2), PACKERS):
            start_both_over(*both, "token-mean", packer, rows)
            batch = put_trained_rows()
            plan = plan_for(batch, packer, shape, micro_batch_rows=rows)
            update = update_both_with(*both, batch, plan, shape.template)
            assert_metrics_agree(update)
            assert_cut_as_told(update, packer, rows)


def assert_pads_vocabulary(worker: Any) -> DataProto:
    from tests.support.padded_vocabulary import MULTIPLE  # it takes the bridge

    engine = worker.actor.engine
    (head,) = (weight for name, weight in engine.module[0].named_parameters() if name.endswith("output_layer.weight"))
    rows = len(head) * engine.engine_config.tensor_model_parallel_size
    assert rows == math.ceil(ODD_VOCABULARY / MULTIPLE) * MULTIPLE
    return DataProto()


CRITIC_TERMS = (
    "+local=cpu_megatron",
    "+critic.optim.override_optimizer_config.adam_eps=1e-5",
    "critic.cliprange_value=0.5",
)
BUDGET_OF_CRITIC = "+critic.ppo_infer_max_token_len_per_gpu={}"


@pytest.fixture(scope="module")
def one_critic(transfer_queue, model) -> Iterator[RayWorkerGroup]:
    """A critic of one rank that sees no pads."""
    with started(start_critic(model, 1, *CRITIC_TERMS, BUDGET_OF_CRITIC.format(4096))) as critic:
        yield critic


@pytest.mark.parametrize("name", SHAPES)
def test_so_do_critics(name, transfer_queue, model, one_critic):
    shape = SHAPES[name]
    settings = [*shape.settings("critic"), BUDGET_OF_CRITIC.format(BUDGET)]
    with started(start_critic(model, shape.ranks, *CRITIC_TERMS, *settings), padded=True) as critics:

        def assert_agree(mode: str, packer: str, batch: KVBatchMeta, plan: BatchPlan, rows: int | None = None) -> None:
            start_both_over(critics, one_critic, mode, packer, rows)
            for workers in (critics, one_critic):
                give_same_head(workers)
            both = update_both_with(critics, one_critic, batch, plan, shape.template, method="train_mini_batch")
            assert_critic_metrics_agree(both)
            assert_cut_as_told(both, packer, rows, "critic")

        for (mode, rows), packer in product((("token-mean", None), ("seq-mean-token-sum", 2)), PACKERS):
            batch = put_trained_rows()
            plan = plan_for(batch, packer, shape, micro_batch_rows=rows, update="critic")
            assert_agree(mode, packer, batch, plan, rows)
        if shape.dp_size > 1:
            batch = put_few_rows()
            assert_agree("token-mean", "plan", batch, plan_of_idle_ranks(batch, "plan", shape, "critic"))


@pytest.fixture(scope="module", params=MIXTURES)
def mixtures(
    request, transfer_queue, mixture, one_rank_of_mixture
) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, Shape]]:
    """Ranks whose routers choose experts for real tokens and pads as they go."""
    shape = MIXTURES[request.param]
    with started(start_actor(mixture, shape.ranks, *ON_MEGATRON, *shape.settings()), padded=True) as padded_ranks:
        if shape.expert_model > 1 and shape.tensor_model > 1:
            padded_ranks.execute_with_func_generator(assert_cuts_rows)
        yield padded_ranks, one_rank_of_mixture, shape


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_ranks_with_a_mixture_of_experts(packer, mixtures):
    padded_ranks, one_rank, shape = mixtures
    start_both_over(padded_ranks, one_rank, "seq-mean-token-mean", packer)
    batch = put_trained_rows()
    both = update_both_with(padded_ranks, one_rank, batch, plan_for(batch, packer, shape), shape.template)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer)


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_ranks_with_a_mixture_in_micro_batches_of_fixed_size(packer, mixtures):
    padded_ranks, one_rank, shape = mixtures
    start_both_over(padded_ranks, one_rank, "token-mean", packer, micro_batch_rows=2)
    batch = put_trained_rows()
    plan = plan_for(batch, packer, shape, micro_batch_rows=2)
    both = update_both_with(padded_ranks, one_rank, batch, plan, shape.template)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer, 2)


def assert_cuts_rows(worker: Any) -> DataProto:
    config = worker.actor.engine.tf_config
    assert config.sequence_parallel
    assert config.expert_model_parallel_size == 2
    return DataProto()


@pytest.mark.parametrize("packer", PACKERS)
def test_so_do_ranks_with_a_mixture_of_which_some_hold_pads_alone(packer, mixtures):
    padded_ranks, one_rank, shape = mixtures
    if shape.dp_size == 1:
        pytest.skip("its ranks share every row")
    start_both_over(padded_ranks, one_rank, "seq-mean-token-mean", packer)
    assert_agrees_where_some_hold_pads_alone(padded_ranks, one_rank, packer, shape, put_few_rows())


def with_drawn_routes(batch: KVBatchMeta) -> KVBatchMeta:
    """Puts experts of each token and layer, (tokens, layers, top k), as if they were recorded."""
    draw = torch.Generator().manual_seed(0)
    scores = [torch.rand(tag["seq_len"], LAYERS, EXPERTS, generator=draw) for tag in batch.tags]
    return with_routes(batch, [of_row.argsort(-1)[..., :TOP_K] for of_row in scores])


def with_routes(batch: KVBatchMeta, routes: Sequence[torch.Tensor]) -> KVBatchMeta:
    column = torch.nested.as_nested_tensor([of_row.to(torch.int16) for of_row in routes], layout=torch.jagged)
    return put_column(batch, "routed_experts", column)


def put_column(batch: KVBatchMeta, name: str, column: torch.Tensor) -> KVBatchMeta:
    """As verl's trainer puts what it has computed; calls with the batch that it gives read the column."""
    fields = TensorDict({name: column}, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields, tags=batch.tags)


@pytest.mark.parametrize(
    ("replay", "name"),
    [("R2", "ep2"), *(("R3", name) for name in ("ep2", "pp2", "pp2 vpp2", "cp2", "tp2 with ep2, twice"))],
)
def test_so_do_ranks_that_replay_routes(replay, name, transfer_queue, mixture):
    shape, replays = MIXTURES[name], REPLAYS.format(replay)
    padded = [*BUDGETS, *shape.settings()]
    with padded_and_plain(start_actor, mixture, *TERMS, replays, padded=padded, ranks=shape.ranks) as both:
        for packer in PACKERS:
            start_both_over(*both, "token-mean", packer)
            batch = with_drawn_routes(put_trained_rows())
            assert_metrics_agree(update_both_with(*both, batch, plan_for(batch, packer, shape), shape.template))
        if shape.dp_size > 1:
            start_both_over(*both, "seq-mean-token-mean", "plan")
            batch = with_drawn_routes(put_few_rows())
            assert_agrees_where_some_hold_pads_alone(*both, "plan", shape, batch)


RECORDING = {name: MIXTURES[name] for name in ("ep2", "pp2 x dp2", "pp2 vpp2")}


@pytest.mark.parametrize("name", RECORDING)
def test_an_update_replays_the_routes_that_a_padded_pass_has_recorded(name, transfer_queue, mixture):
    shape, replays = RECORDING[name], REPLAYS.format("R2")
    padded = [*BUDGETS, *shape.settings()]
    with padded_and_plain(start_actor, mixture, *TERMS, replays, padded=padded, ranks=shape.ranks) as both:
        for packer in PACKERS:
            assert_replays_what_was_recorded(*both, packer, shape)
            empty_queue()


def assert_replays_what_was_recorded(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, packer: str, shape: Shape
) -> None:
    start_both_over(padded_ranks, one_rank, "token-mean", packer)
    want = read(after_pass(one_rank, put_trained_rows()), "routed_experts")
    empty_queue()

    batch = put_trained_rows()
    plan = plan_for(batch, packer, shape)
    assert plan.layouts["log_prob"].n_pads > 0, "the pass was meant to have pads"
    with_pads = upsample(batch, plan, shape.template)
    batch = after_pass(PaddedWorkerGroup(padded_ranks, lambda: with_pads), batch)
    recorded = read(batch, "routed_experts")
    assert all(map(torch.equal, recorded, want))
    update = update_both_with(padded_ranks, one_rank, batch, plan, shape.template, padded=with_pads)
    assert_metrics_agree(update)
    assert update.padded["actor/ppo_kl"][0] == pytest.approx(0, abs=1e-6), "of the pass and the first step"

    # What is replayed is what rows have: with other experts in it, the first step has other log-probs.
    start_both_over(padded_ranks, one_rank, "token-mean", packer)
    batch = with_routes(batch, [(experts + 1) % EXPERTS for experts in recorded])
    update = update_both_with(padded_ranks, one_rank, batch, plan, shape.template)
    assert_metrics_agree(update)
    assert abs(update.padded["actor/ppo_kl"][0]) > 1e-4


def after_pass(workers: Any, batch: KVBatchMeta) -> KVBatchMeta:
    """Has log-probs computed and put, as verl's trainer does before an update."""
    workers.compute_log_prob(call(batch, batch.keys, calculate_entropy=True, compute_loss=False))
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["log_probs", "response_mask"])
    return put_column(batch, "old_log_probs", response_from_nested(data["log_probs"], data["response_mask"]))


def read(batch: KVBatchMeta, name: str) -> list[torch.Tensor]:
    return list(tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[name])[name].unbind())
