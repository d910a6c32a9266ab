"""Zero effect on mixtures of experts of verl's Megatron engine, whose routers choose experts, record them, replay them.

The rank without pads is one of FSDP2, which computes the model of Hugging Face; where routes are replayed, it is one of
Megatron, since FSDP2 replays none, and so it is for critics.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.utils.padding import response_from_nested

from tests.equivalence.megatron_shapes import (
    EXPERTS,
    LAYERS,
    ON_FSDP2,
    ON_MEGATRON,
    TERMS,
    Shape,
    assert_critics_agree,
    one_critic_of,
    started,
    with_shared_heads,
)
from tests.equivalence.updates import (
    BUDGETS,
    EACH_CUT,
    PACKERS,
    PAD_TOKENS,
    BothUpdates,
    assert_metrics_agree,
    assert_updates_agree,
    call,
    plan_of,
    put_few_rows,
    put_trained_rows,
    update_both,
)
from tests.support.fsdp2_workers import empty_queue, padded_and_plain, start_actor, start_over
from tests.support.padded_rows import upsample
from tests.support.rows_in_queue import PARTITION
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.plan import BatchPlan
from verl_padding.worker.plan_packer import install

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]

REPLAYS = "actor_rollout_ref.actor.megatron.router_replay.mode={}"
MIXTURES = {
    "dp2": Shape(),
    "pp2": Shape(pipeline_model=2),
    "pp2 vpp2": Shape(pipeline_model=2, virtual_pipeline_model=2),
    # Ranks that share a row's tensors also cut its tokens among them (sequence parallel), and send those to experts,
    # which are cut themselves where they are not shared out.
    "tp2": Shape(tensor_model=2),
    "cp2": Shape(context=2),
    "pp2 x dp2": Shape(ranks=4, pipeline_model=2),
    "tp2 x dp2": Shape(ranks=4, tensor_model=2),
    "cp2 x dp2": Shape(ranks=4, context=2),
    "ep2": Shape(expert_model=2),
    "tp2 with ep2": Shape(tensor_model=2, expert_model=2),
    "tp2 with ep2, twice": Shape(ranks=4, tensor_model=2, expert_model=2),
}
TOP_K = 2


def test_pads_are_as_long_as_each_shape_asks():
    asked = {name: shape.template.length for name, shape in MIXTURES.items()}
    assert {name: length for name, length in asked.items() if length > PAD_TOKENS} == {"cp2": 4, "cp2 x dp2": 4}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """As many, for the same."""
    folder = make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("mixture"))
    return with_shared_heads(folder, num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS)


@pytest.fixture(scope="module")
def one_rank_of_mixture(transfer_queue, mixture) -> Iterator[RayWorkerGroup]:
    with started(start_actor(mixture, 1, *ON_FSDP2)) as rank:
        yield rank


@pytest.fixture(scope="module", params=MIXTURES)
def mixtures(
    request, transfer_queue, mixture, one_rank_of_mixture
) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, Shape]]:
    """Ranks whose routers choose experts for real tokens and pads as they go."""
    shape = MIXTURES[request.param]
    with started(start_actor(mixture, shape.ranks, *ON_MEGATRON, *shape.settings()), padded=True) as padded_ranks:
        if shape.tensor_model > 1:
            padded_ranks.execute_with_func_generator(assert_cuts_rows_and_experts(shape))
        yield padded_ranks, one_rank_of_mixture, shape


@EACH_CUT
def test_ranks_with_a_mixture_of_experts_end_with_the_weights_of_one_rank_without_pads(cut, mixtures):
    padded_ranks, one_rank, shape = mixtures
    if cut not in shape.cuts:
        pytest.skip("its ranks share every row")
    assert_updates_agree(padded_ranks, one_rank, **cut, **shape.planned)


def assert_cuts_rows_and_experts(shape: Shape) -> Callable[[Any], DataProto]:
    def check(worker: Any) -> DataProto:
        config = worker.actor.engine.tf_config
        assert config.sequence_parallel
        assert config.expert_model_parallel_size == shape.expert_model
        assert config.expert_tensor_parallel_size == (1 if shape.expert_model > 1 else shape.tensor_model)
        return DataProto()

    return check


def test_so_do_critics_of_a_mixture_whose_ranks_share_experts(transfer_queue, mixture):
    with one_critic_of(mixture) as one_critic:
        for name in ("ep2", "tp2 with ep2, twice"):
            assert_critics_agree(mixture, MIXTURES[name], one_critic)


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
    [
        ("R2", "ep2"),
        *(("R3", name) for name in ("dp2", "pp2", "pp2 vpp2", "tp2", "cp2", "ep2", "tp2 with ep2, twice")),
    ],
)
def test_so_do_ranks_that_replay_routes(replay, name, transfer_queue, mixture):
    shape, replays = MIXTURES[name], REPLAYS.format(replay)
    padded = [*BUDGETS, *shape.settings()]
    with padded_and_plain(start_actor, mixture, *TERMS, replays, padded=padded, ranks=shape.ranks) as both:
        for packer in PACKERS:
            update = assert_updates_agree(*both, packer, put=put_routed_rows, **shape.planned)
        for layer in (0, LAYERS - 1):
            batch = put_routed_rows()
            assert_other_experts_give_another_update(layer, *both, shape, update, batch, plan_for(batch, "plan", shape))
        if shape.dp_size > 1:
            few = {"few": True, "put": lambda: with_drawn_routes(put_few_rows())}
            assert_updates_agree(*both, "plan", **few, **shape.planned)


def put_routed_rows() -> KVBatchMeta:
    return with_drawn_routes(put_trained_rows())


RECORDING = {name: MIXTURES[name] for name in ("ep2", "pp2 x dp2", "pp2 vpp2")}


@pytest.mark.parametrize("name", RECORDING)
def test_an_update_replays_the_routes_that_a_padded_pass_has_recorded(name, transfer_queue, mixture):
    shape, replays = RECORDING[name], REPLAYS.format("R2")
    padded = [*BUDGETS, *shape.settings()]
    with padded_and_plain(start_actor, mixture, *TERMS, replays, padded=padded, ranks=shape.ranks) as both:
        for packer, layer in zip(PACKERS, (0, LAYERS - 1), strict=True):
            assert_replays_what_was_recorded(*both, packer, shape, layer)
            empty_queue()


def assert_replays_what_was_recorded(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, packer: str, shape: Shape, layer: int
) -> None:
    for workers in (padded_ranks, one_rank):
        start_over(workers, "token-mean")
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())
    want = read(after_pass(one_rank, put_trained_rows()), "routed_experts")
    empty_queue()

    batch = put_trained_rows()
    plan = plan_for(batch, packer, shape)
    assert plan.layouts["log_prob"].n_pads > 0, "the pass was meant to have pads"
    with_pads = upsample(batch, plan, shape.template)
    batch = after_pass(PaddedWorkerGroup(padded_ranks, lambda: with_pads), batch)
    recorded = read(batch, "routed_experts")
    assert all(map(torch.equal, recorded, want))
    update = update_both(padded_ranks, one_rank, batch, plan, template=shape.template, padded=with_pads)
    assert_metrics_agree(update)
    assert update.padded["actor/ppo_kl"][0] == pytest.approx(0, abs=1e-6), "of the pass and the first step"
    assert_other_experts_give_another_update(layer, padded_ranks, one_rank, shape, update, batch, plan)


def plan_for(batch: KVBatchMeta, packer: str, shape: Shape) -> BatchPlan:
    sizes = shape.planned
    return plan_of(batch, packer, pad_tokens=sizes.pop("template").length, **sizes)


def assert_other_experts_give_another_update(
    layer: int,
    padded_ranks: RayWorkerGroup,
    one_rank: RayWorkerGroup,
    shape: Shape,
    update: BothUpdates,
    batch: KVBatchMeta,
    plan: BatchPlan,
) -> None:
    """What is replayed is what rows have: with other experts in the layer, the first step has other log-probs."""
    others = [of_row.clone() for of_row in read(batch, "routed_experts")]
    for of_row in others:
        of_row[:, layer] = (of_row[:, layer] + 1) % EXPERTS
    for workers in (padded_ranks, one_rank):
        start_over(workers, "token-mean")
    other = update_both(padded_ranks, one_rank, with_routes(batch, others), plan, template=shape.template)
    assert_metrics_agree(other)
    first, changed = (both.padded["actor/ppo_kl"][0] for both in (update, other))
    assert abs(changed - first) > 1e-4


def after_pass(workers: Any, batch: KVBatchMeta) -> KVBatchMeta:
    """Has log-probs computed and put, as verl's trainer does before an update."""
    workers.compute_log_prob(call(batch, batch.keys, calculate_entropy=True, compute_loss=False))
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["log_probs", "response_mask"])
    return put_column(batch, "old_log_probs", response_from_nested(data["log_probs"], data["response_mask"]))


def read(batch: KVBatchMeta, name: str) -> list[torch.Tensor]:
    return list(tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[name])[name].unbind())
