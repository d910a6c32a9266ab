"""Zero effect on what verl's Megatron engine alone does: denominators of its own, routes.

test_engine_shapes.py has its updates in each shape. The rank without pads is one of FSDP2, which
computes the model of Hugging Face; it is one of Megatron where routes are replayed.
"""

from contextlib import contextmanager

import pytest
import torch
from verl.protocol import DataProto

from tests.support.engine_shapes import EXPERTS, LAYERS, SHAPES, Shape, started
from tests.support.fsdp2_workers import start_over
from tests.support.padded_group import padded_group
from tests.support.padded_rows import upsample
from tests.support.rows_in_queue import empty_queue, put_columns, put_rows, read_columns
from tests.support.trained_batches import (
    LENGTHS,
    put_few_rows,
    put_full_rows,
    put_trained_rows,
    with_trained_fields,
)
from tests.support.updates import (
    CUTS,
    assert_metrics_agree,
    assert_updates_agree,
    call,
    plan_of,
    read_log_probs,
    update_both,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]

MEGATRON = "actor_rollout_ref.actor.megatron"
PER_TOKEN = f"+{MEGATRON}.override_transformer_config.calculate_per_token_loss=true"
BY_SIZE = [cut for cut in CUTS.values() if not {"few", "sharing"} & cut.keys()]
TOP_K = 2
# With context parallelism, verl drops the fraction of a token that each rank would have of a
# micro-batch: lengths are even here (docs/compatibility.md).
EVEN_LENGTHS = [(prompt, response + (prompt + response) % 2) for prompt, response in LENGTHS]


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2"])
def test_ranks_whose_gradients_are_divided_by_tokens_agree_with_one_rank(
    name, model_of, one_rank_of
):
    # Megatron-Bridge turns it on with context parallelism: a loss times all tokens, then gradients
    # over all tokens, and those of pads are among both.
    shape = SHAPES[f"Megatron: {name}"]
    even = {"mode": "token-mean", "put": lambda: with_trained_fields(put_rows(EVEN_LENGTHS))}
    with started(shape, model_of(shape), PER_TOKEN) as padded:
        padded.execute_with_func_generator(assert_divides_by_tokens)
        for cut in BY_SIZE:
            assert_updates_agree(padded, one_rank_of(shape), **cut, **shape.planned, **even)
        if shape.dp_size > 1:
            full = {"packer": "plan", "put": put_full_rows, "mode": "token-mean"}
            assert_updates_agree(padded, one_rank_of(shape), **full, **shape.planned)


def assert_divides_by_tokens(worker):
    assert worker.actor.engine.tf_config.calculate_per_token_loss
    return DataProto()


@contextmanager
def on_megatron(shape, model, *more):
    """Padded ranks of a shape, and one rank without pads, both of Megatron."""
    alone = Shape(engine="megatron", kind=shape.kind, ranks=1)
    with started(shape, model, *more) as padded_ranks, started(alone, model, *more) as one_rank:
        yield padded_ranks, one_rank


def with_drawn_routes(batch):
    """Puts experts of each token and layer, (tokens, layers, top k), as if they were recorded."""
    draw = torch.Generator().manual_seed(0)
    scores = [torch.rand(tag["seq_len"], LAYERS, EXPERTS, generator=draw) for tag in batch.tags]
    routes = [of_row.argsort(-1)[..., :TOP_K].to(torch.int16) for of_row in scores]
    return put_columns(batch, routed_experts=routes)


@pytest.mark.parametrize("name", ["dp2", "pp2 vpp2", "cp2", "tp2 with ep2, twice"])
def test_so_do_ranks_that_replay_routes(name, transfer_queue, model_of):
    shape = SHAPES[f"Megatron: experts, {name}"]
    with on_megatron(shape, model_of(shape), f"{MEGATRON}.router_replay.mode=R3") as both:
        for packer in ("verl", "plan"):
            assert_updates_agree(
                *both, packer, put=lambda: with_drawn_routes(put_trained_rows()), **shape.planned
            )
        if shape.dp_size > 1:
            few = {"few": True, "put": lambda: with_drawn_routes(put_few_rows())}
            assert_updates_agree(*both, "plan", **few, **shape.planned)


@pytest.mark.parametrize("name", ["ep2", "pp2 vpp2"])
def test_an_update_replays_the_routes_that_a_padded_pass_has_recorded(
    name, transfer_queue, model_of
):
    shape = SHAPES[f"Megatron: experts, {name}"]
    template = shape.planned["template"]
    with on_megatron(shape, model_of(shape), f"{MEGATRON}.router_replay.mode=R2") as both:
        padded_ranks, one_rank = both
        for packer in ("verl", "plan"):
            start_over(both, "token-mean")
            want = read_columns(after_pass(one_rank, put_trained_rows()), "routed_experts")[0]
            empty_queue()

            batch = put_trained_rows()
            plan = plan_for(batch, packer, shape)
            assert plan.layouts["log_prob"].n_pads > 0 or shape.dp_size == 1
            with_pads = upsample(batch, plan, template)
            batch = after_pass(padded_group(padded_ranks, with_pads), batch)
            (recorded,) = read_columns(batch, "routed_experts")
            assert all(map(torch.equal, recorded, want))
            update = update_both(*both, batch, plan, template=template, padded=with_pads)
            assert_metrics_agree(update)
            of_first_step = update.padded["actor/ppo_kl"][0]
            assert of_first_step == pytest.approx(0, abs=1e-6)
            empty_queue()


def plan_for(batch, packer, shape):
    sizes = dict(shape.planned)
    return plan_of(batch, packer, pad_tokens=sizes.pop("template").length, **sizes)


def after_pass(workers, batch):
    """Has log-probs computed and put, as verl's trainer does before an update."""
    workers.compute_log_prob(call(batch, batch.keys, calculate_entropy=True, compute_loss=False))
    return put_columns(batch, old_log_probs=read_log_probs(batch))
