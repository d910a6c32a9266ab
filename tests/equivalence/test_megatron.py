"""Zero effect on verl's Megatron engine: padded ranks of each shape end with the weights of one rank without pads.

That rank is one of FSDP2, which computes the model of Hugging Face. It is one of Megatron for a critic, since its
critics draw their own head, and for a vocabulary that is padded.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.megatron_shapes import (
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
    CUTS,
    EACH_CUT,
    LENGTHS,
    PAD_TOKENS,
    assert_updates_agree,
    with_trained_fields,
)
from tests.support.fsdp2_workers import padded_and_plain, start_actor
from tests.support.rows_in_queue import put_rows
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]

PER_TOKEN = "+actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss=true"
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
ODD_VOCABULARY = 261
"""A vocabulary that two tensor parallel ranks cannot share as it is."""
BY_SIZE = [cut for cut in CUTS.values() if "few" not in cut]
BUCKET = 16
ROUND_UP = (
    "actor_rollout_ref.actor.megatron.pad_to_length=true",
    f"actor_rollout_ref.actor.megatron.pad_to_length_bucket={BUCKET}",
)
"""verl then fills the last row of each micro-batch up, to a multiple of so many tokens in all."""


def test_pads_are_as_long_as_each_shape_asks():
    asked = {name: shape.template.length for name, shape in SHAPES.items()}
    more = {name: length for name, length in asked.items() if length > PAD_TOKENS}
    assert more == {"cp2": 4, "cp2 x dp2": 4, "tp2 x cp2": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With layers for a virtual pipeline."""
    folder = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    return with_shared_heads(folder, num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS)


@pytest.fixture(scope="module")
def one_rank(transfer_queue, model) -> Iterator[RayWorkerGroup]:
    """A rank that sees no pads, of FSDP2."""
    with started(start_actor(model, 1, *ON_FSDP2)) as rank:
        yield rank


@pytest.fixture(scope="module", params=SHAPES)
def actors(request, transfer_queue, model, one_rank) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup, Shape]]:
    shape = SHAPES[request.param]
    with started(start_actor(model, shape.ranks, *ON_MEGATRON, *shape.settings()), padded=True) as padded_ranks:
        yield padded_ranks, one_rank, shape


@EACH_CUT
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(cut, actors):
    padded_ranks, one_rank, shape = actors
    if cut not in shape.cuts:
        pytest.skip("its ranks share every row")
    assert_updates_agree(padded_ranks, one_rank, **cut, **shape.planned)


# With context parallelism, verl drops the fraction of a token that each rank would have of a micro-batch: lengths are
# even here (docs/limits.md).
EVEN_LENGTHS = [(prompt, response + (prompt + response) % 2) for prompt, response in LENGTHS]


@pytest.mark.parametrize("shape", [Shape(), Shape(context=2), Shape(tensor_model=2)], ids=["dp2", "cp2", "tp2"])
def test_so_do_ranks_whose_gradients_megatron_divides_by_their_tokens(shape, transfer_queue, model, one_rank):
    # Megatron-Bridge turns it on with context parallelism: a loss times all tokens, then gradients over all tokens,
    # and those of pads are among both.
    with started(start_actor(model, shape.ranks, *ON_MEGATRON, *shape.settings(), PER_TOKEN), padded=True) as padded:
        padded.execute_with_func_generator(assert_divides_by_tokens)
        for cut in BY_SIZE:
            assert_updates_agree(padded, one_rank, **cut, **shape.planned, mode="token-mean", put=put_even_rows)


def put_even_rows() -> KVBatchMeta:
    return with_trained_fields(put_rows(EVEN_LENGTHS))


def assert_divides_by_tokens(worker: Any) -> DataProto:
    assert worker.actor.engine.tf_config.calculate_per_token_loss
    return DataProto()


def test_so_do_ranks_whose_micro_batches_verl_rounds_up(transfer_queue, model, one_rank):
    shape = SHAPES["dp2"]
    with started(start_actor(model, shape.ranks, *ON_MEGATRON, *ROUND_UP), padded=True) as padded:
        for cut in shape.cuts:
            noted = {"started": lambda padded, _: padded.execute_with_func_generator(note_lengths)}
            assert_updates_agree(padded, one_rank, **cut, **shape.planned, **noted, mode="seq-mean-token-mean")
            padded.execute_with_func_generator(assert_rounded_up)


def note_lengths(worker: Any) -> DataProto:
    engine = worker.actor.engine
    engine.lengths = set()
    engine.module[0].register_forward_pre_hook(
        lambda _, __, named: engine.lengths.add(named["input_ids"].shape[-1]), with_kwargs=True
    )
    return DataProto()


def assert_rounded_up(worker: Any) -> DataProto:
    lengths = worker.actor.engine.lengths
    assert lengths
    assert not any(length % BUCKET for length in lengths), lengths
    return DataProto()


def test_ranks_whose_vocabulary_is_padded_agree_with_one_that_pads_it_too(transfer_queue, tmp_path):
    # Not with one of FSDP2: verl's softmax on Megatron has the tokens in it that fill the vocabulary up.
    model = with_shared_heads(make_tiny_model("qwen2", tmp_path), vocab_size=ODD_VOCABULARY)
    padding = "actor_rollout_ref.model.external_lib=tests.support.padded_vocabulary"
    shape = SHAPES["tp2"]
    with padded_and_plain(start_actor, model, *TERMS, padding, padded=[*BUDGETS, *shape.settings()]) as both:
        for workers in both:
            workers.execute_with_func_generator(assert_pads_vocabulary)
        for cut in BY_SIZE:
            update = assert_updates_agree(*both, **cut, **shape.planned, mode="token-mean")
            assert update.plain[0]["actor/entropy_loss"][0] > math.log(ODD_VOCABULARY), "it could be one of FSDP2 now"


def assert_pads_vocabulary(worker: Any) -> DataProto:
    from tests.support.padded_vocabulary import MULTIPLE  # it takes the bridge

    engine = worker.actor.engine
    (head,) = (weight for name, weight in engine.module[0].named_parameters() if name.endswith("output_layer.weight"))
    rows = len(head) * engine.engine_config.tensor_model_parallel_size
    assert rows == math.ceil(ODD_VOCABULARY / MULTIPLE) * MULTIPLE
    return DataProto()


@pytest.fixture(scope="module")
def one_critic(transfer_queue, model) -> Iterator[RayWorkerGroup]:
    with one_critic_of(model) as critic:
        yield critic


@pytest.mark.parametrize("name", SHAPES)
def test_so_do_critics(name, transfer_queue, model, one_critic):
    assert_critics_agree(model, SHAPES[name], one_critic)
