"""Zero effect on verl's Megatron engine: padded ranks of each shape end with the weights of one rank without pads."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from transformers import AutoConfig, AutoModelForCausalLM
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.test_actor_update import BUDGETS, assert_metrics_agree
from tests.equivalence.test_critic_update import assert_critic_metrics_agree
from tests.equivalence.updates import (
    BUDGET,
    EPOCHS,
    LENGTHS,
    assert_packed_as_planned,
    put_few_rows,
    put_trained_rows,
    update_both,
    update_both_with,
    with_trained_fields,
)
from tests.support.fsdp2_workers import give_same_head, padded_and_plain, start_actor, start_critic, start_over
from tests.support.rows_in_queue import put_rows
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.template import PadTemplate
from verl_padding.patches.plan_packer import install
from verl_padding.plan import BatchPlan, Job, Rows, Update, plan_batch
from verl_padding.trainer.losses import MICRO_BATCHES

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]

TERMS = (
    "+local=cpu_megatron",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.loss_scale_factor=16",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps=1e-5",
)
SIZE = "actor_rollout_ref.actor.megatron.{}_parallel_size={}"
SHAPES = {
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_model": 2}),
    "pp2 vpp2": (2, {"pipeline_model": 2, "virtual_pipeline_model": 2}),
    "tp2": (2, {"tensor_model": 2}),
    "cp2": (2, {"context": 2}),
    "pp2 x dp2": (4, {"pipeline_model": 2}),
    "tp2 x dp2": (4, {"tensor_model": 2}),
    "cp2 x dp2": (4, {"context": 2}),
}
"""Ranks, and their parallel sizes."""


PAD_TOKENS = 8
LAYERS, EXPERTS, TOP_K = 2, 4, 2
SHARED_EXPERTS = (
    SIZE.format("expert_model", 2),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
)
"""Two ranks with half of the experts each."""
ODD_VOCABULARY = 261
"""A vocabulary that two tensor parallel ranks cannot share as it is."""


def with_shared_heads(folder: Path, vocab_size: int = 320, **changes: Any) -> Path:
    """The tiny model of a folder, with heads and a vocabulary that two tensor parallel ranks can share."""
    config = AutoConfig.from_pretrained(folder, num_key_value_heads=2, vocab_size=vocab_size, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four layers, for a virtual pipeline."""
    folder = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    return with_shared_heads(folder, num_hidden_layers=4, layer_types=["full_attention"] * 4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return with_shared_heads(make_tiny_model("qwen3_moe", tmp_path_factory.mktemp("mixture")))


@pytest.fixture(scope="module", params=SHAPES)
def actors(request, transfer_queue, model) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, int, dict[str, int]]]:
    ranks, sizes = SHAPES[request.param]
    shape = [SIZE.format(name, size) for name, size in sizes.items()]
    with padded_and_plain(start_actor, model, *TERMS, padded=[*BUDGETS, *shape], ranks=ranks) as (padded, plain):
        sharing = math.prod(sizes.get(name, 1) for name in ("pipeline_model", "tensor_model", "context"))
        yield padded, plain, ranks // sharing, sizes


def plan_for(
    batch: KVBatchMeta,
    packer: str,
    dp_size: int,
    sizes: dict[str, int],
    prompts: int = 6,
    micro_batch_rows: int | None = None,
) -> BatchPlan:
    """Three mini-batches; pads of eight tokens, which no shape here rounds up."""
    micro_batches: dict[str, Any] = (
        {"token_budget": BUDGET * sizes.get("context", 1)}
        if micro_batch_rows is None
        else {"micro_batch_rows": micro_batch_rows}
    )
    update = Update(
        dp_size=dp_size,
        prompts_per_mini_batch=prompts // 3,
        micro_batch_multiple=2 if "virtual_pipeline_model" in sizes else 1,
        **micro_batches,
    )
    job = Job(
        strategy="prompt",
        prompts=prompts,
        sessions_per_prompt=2,
        updates={"actor": update},
        inference={},
        packer=packer,
        pad_tokens=PAD_TOKENS,
    )
    plan = plan_batch(Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags]), job)
    assert plan.layouts["actor"].n_mini_batches == 3
    return plan


@pytest.mark.parametrize("packer", ["verl", "plan"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, packer, actors):
    padded_ranks, one_rank, dp_size, sizes = actors
    for workers in (padded_ranks, one_rank):
        start_over(workers, mode)
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())
    batch = put_trained_rows()
    plan = plan_for(batch, packer, dp_size, sizes)
    template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
    both = update_both_with(padded_ranks, one_rank, batch, plan, template)
    assert_metrics_agree(both)
    if packer == "plan":
        assert_packed_as_planned(both)


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_so_do_ranks_with_micro_batches_of_fixed_size(packer, actors):
    padded_ranks, one_rank, dp_size, sizes = actors
    start_over(one_rank, "seq-mean-token-mean")
    start_over(padded_ranks, "seq-mean-token-mean", micro_batch_rows=2)
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())
    batch = put_trained_rows()
    plan = plan_for(batch, packer, dp_size, sizes, micro_batch_rows=2)
    rows = plan.layouts["actor"].rows_per_cell
    assert rows % (4 if "virtual_pipeline_model" in sizes else 2) == 0
    both = update_both_with(padded_ranks, one_rank, batch, plan, PadTemplate(eos_token_id=3, length=PAD_TOKENS))
    assert_metrics_agree(both)
    assert both.padded[MICRO_BATCHES] == [rows / 2] * EPOCHS * 3


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_so_do_ranks_of_which_some_hold_pads_alone(packer, actors):
    padded_ranks, one_rank, dp_size, sizes = actors
    if dp_size == 1:
        pytest.skip("its ranks share every row")
    for workers in (padded_ranks, one_rank):
        start_over(workers, "seq-mean-token-mean")
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())
    batch = put_few_rows()
    plan = plan_for(batch, packer, dp_size, sizes, prompts=3)
    assert plan.layouts["actor"].reporting_ranks_M == (1, 1, 2), "one group of ranks was meant to have pads alone"
    template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
    assert_metrics_agree(update_both_with(padded_ranks, one_rank, batch, plan, template))


def test_so_do_ranks_whose_gradients_megatron_divides_by_their_tokens(transfer_queue, model):
    # Megatron-Bridge turns it on with context parallelism: a loss times all tokens, then gradients over all tokens,
    # and those of pads are among both.
    per_token = "+actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss=true"
    with padded_and_plain(start_actor, model, *TERMS, padded=[*BUDGETS, per_token]) as (padded, plain):
        padded.execute_with_func_generator(assert_divides_by_tokens)
        template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
        batch = put_trained_rows()
        assert_metrics_agree(update_both_with(padded, plain, batch, plan_for(batch, "verl", 2, {}), template))


def assert_divides_by_tokens(worker: Any) -> DataProto:
    assert worker.actor.engine.tf_config.calculate_per_token_loss
    return DataProto()


def test_so_do_ranks_whose_vocabulary_is_padded(transfer_queue, tmp_path):
    model = with_shared_heads(make_tiny_model("qwen2", tmp_path), vocab_size=ODD_VOCABULARY)
    padding = "actor_rollout_ref.model.external_lib=tests.support.padded_vocabulary"
    shape = SIZE.format("tensor_model", 2)
    with padded_and_plain(start_actor, model, *TERMS, padding, padded=[*BUDGETS, shape]) as (padded, plain):
        for workers in (padded, plain):
            workers.execute_with_func_generator(assert_pads_vocabulary)
        batch = put_trained_rows()
        template = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
        assert_metrics_agree(update_both_with(padded, plain, batch, plan_for(batch, "verl", 1, {}), template))


def assert_pads_vocabulary(worker: Any) -> DataProto:
    from tests.support.padded_vocabulary import MULTIPLE  # it takes the bridge

    engine = worker.actor.engine
    (head,) = (weight for name, weight in engine.module[0].named_parameters() if name.endswith("output_layer.weight"))
    rows = len(head) * engine.engine_config.tensor_model_parallel_size
    assert rows == math.ceil(ODD_VOCABULARY / MULTIPLE) * MULTIPLE
    return DataProto()


def test_so_do_critics(transfer_queue, model):
    overrides = (
        "+local=cpu_megatron",
        "+critic.optim.override_optimizer_config.adam_eps=1e-5",
        "critic.cliprange_value=0.5",
    )
    budget = "+critic.ppo_infer_max_token_len_per_gpu"
    budgets = {"padded": [f"{budget}={BUDGET}"], "plain": [f"{budget}=4096"]}
    with padded_and_plain(start_critic, model, *overrides, **budgets) as critics:
        for mode in ("token-mean", "seq-mean-token-sum"):
            for workers in critics:
                start_over(workers, mode)
                give_same_head(workers)
            assert_critic_metrics_agree(update_both(*critics, method="train_mini_batch"))


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_so_do_ranks_that_share_experts_whose_routes_are_recorded(replay, transfer_queue, mixture):
    recorded = f"actor_rollout_ref.actor.megatron.router_replay.mode={replay}"
    with padded_and_plain(start_actor, mixture, *TERMS, recorded, padded=[*BUDGETS, *SHARED_EXPERTS]) as both:
        assert_mixtures_agree(*both, dp_size=2)


# Ranks that share a row's tensors also cut its tokens among them (sequence parallel), and send these to the experts.
@pytest.mark.parametrize(("replay", "ranks"), [("disabled", 2), ("R3", 4)])
def test_so_do_ranks_that_share_experts_and_cut_rows_among_them(replay, ranks, transfer_queue, mixture):
    recorded = f"actor_rollout_ref.actor.megatron.router_replay.mode={replay}"
    cut = [*BUDGETS, *SHARED_EXPERTS, SIZE.format("tensor_model", 2)]
    with padded_and_plain(start_actor, mixture, *TERMS, recorded, padded=cut, ranks=ranks) as (padded, plain):
        padded.execute_with_func_generator(assert_cuts_rows)
        assert_mixtures_agree(padded, plain, dp_size=ranks // 2)


def assert_cuts_rows(worker: Any) -> DataProto:
    config = worker.actor.engine.tf_config
    assert config.sequence_parallel
    assert config.expert_model_parallel_size == 2
    return DataProto()


def assert_mixtures_agree(padded: RayWorkerGroup, plain: RayWorkerGroup, dp_size: int) -> None:
    """For rows with the routes of each token; whether routers follow them, the workers know."""
    draw = torch.Generator().manual_seed(0)

    def routes(tokens: int) -> torch.Tensor:
        """Experts of each token and layer, (tokens, layers, top k)."""
        return torch.rand(tokens, LAYERS, EXPERTS, generator=draw).argsort(-1)[..., :TOP_K].to(torch.int16)

    batch = put_rows(LENGTHS, routed_experts=[routes(sum(length)) for length in LENGTHS])
    batch = with_trained_fields(batch, draw)
    template = PadTemplate(eos_token_id=3, length=PAD_TOKENS, n_experts=lambda: EXPERTS)
    assert_metrics_agree(update_both_with(padded, plain, batch, plan_for(batch, "verl", dp_size, {}), template))
