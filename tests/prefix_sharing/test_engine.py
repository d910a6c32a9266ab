"""Tips of micro-batches, and outputs expanded to all rows; on verl's engine, before it has anything
to run."""

import functools
from types import SimpleNamespace

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.fsdp_turbo_impl import FSDPTurboEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.utils import prepare_micro_batches

from tests.support.token_rows import rows_of
from verl_padding.errors import PaddingDataError, PaddingError
from verl_padding.pads.planned_call import BATCH_ROW, CALL, PlannedCall
from verl_padding.plan import Layout
from verl_padding.prefix_sharing.engine import engine_incompatibilities, find_trie
from verl_padding.prefix_sharing.prefix_trie import TRIE
from verl_padding.worker.padded_engine import padded
from verl_padding.worker.plan_packer import follow_plan

CHAIN = [[5, 6, 7], [9, 9], [5, 6, 7, 8, 5], [5, 6, 7, 8, 5, 6], [5, 6, 9, 9]]
"""Rows 0, 2 and 3 are a chain; 1 and 4 are alone."""


@pytest.mark.parametrize("branches", [False, True])
def test_rows_of_other_images_between_them_keep_no_rows_from_sharing(branches):
    images = [
        {"pixel_values": torch.full((n, 4), value)}
        for value, n in ((1.0, 2), (2.0, 2), (1.0, 4), (2.0, 4))
    ]
    data = rows_of(
        [[5, 6, 7], [5, 6, 7], [5, 6, 7, 8, 5], [5, 6, 7, 8, 5]],
        multi_modal_inputs=images,
    )
    trie = find_trie(data, may_branch=branches, position_R=[1, 3, 0, 2])
    assert trie.tokens == 10
    assert [places.tolist() for places in trie.place_RT] == [
        [0, 1, 2],
        [5, 6, 7],
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_rows_with_images_beside_them_share_no_more_than_chains():
    data = rows_of(
        [[5, 6, 7, 8], [5, 6, 7, 9], [9, 9]],
        multi_modal_inputs=[{}, {}, {"pixel_values": torch.ones(2, 4)}],
    )
    assert not find_trie(data, may_branch=True).has_branches


def cut(tokens, *, budget=12, chained=True, packed=True):
    """The one micro-batch of these rows, as the plan cuts it."""
    data = rows_of(tokens)
    data[BATCH_ROW] = torch.arange(len(tokens))
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=budget,
        sp_size=1,
        use_remove_padding=packed,
    )
    layout = Layout(
        n_rows=len(tokens), rows_MDK=(((tuple(range(len(tokens))),),),), cut_by="tokens"
    )
    call = PlannedCall(layout=layout, may_branch=False if chained else None)
    tu.assign_non_tensor_data(data, CALL, call)
    (micro_batch,), _ = follow_plan(prepare_micro_batches)(data)
    return micro_batch


class Scoring(FSDPEngineWithLMHead):
    """verl's engine, whose model has whatever outputs it is given."""

    def __init__(self):
        self.engine_config, self.module = SimpleNamespace(), torch.nn.Module()

    @functools.wraps(FSDPEngineWithLMHead.prepare_model_inputs)
    def prepare_model_inputs(self, micro_batch):
        return {}, {}

    @functools.wraps(FSDPEngineWithLMHead.prepare_model_outputs)
    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        return {"scores": output}


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(3, 8),
        torch.nested.as_nested_tensor([torch.ones(1)] * 3, layout=torch.jagged),
    ],
    ids=["values per row", "responses alone"],
)
def test_an_output_that_is_not_one_value_per_token_is_refused(output):
    engine, micro_batch = padded(Scoring)(), cut(CHAIN)
    _, output_args = engine.prepare_model_inputs(micro_batch=micro_batch)
    with pytest.raises(PaddingError, match=r"'scores' of .*Scoring must be nested, "):
        engine.prepare_model_outputs(output, output_args, micro_batch, None)


def test_the_budget_counts_computed_tokens(caplog):
    cut(CHAIN)
    assert caplog.text == ""
    cut(CHAIN, budget=11)
    assert "computes 12 tokens, more than its budget of 11" in caplog.text
    with pytest.raises(PaddingDataError, match="20 tokens, more than its budget of 18"):
        cut(CHAIN, budget=18, chained=False)


def test_a_chain_that_is_none_is_computed(caplog):
    micro_batch = cut([[1, 2, 3], [5], [1, 2, 4], [1, 2, 5, 6]], budget=11)
    assert TRIE not in micro_batch
    assert [len(row) for row in micro_batch["input_ids"].unbind()] == [3, 1, 3, 4]
    assert caplog.text == ""


def test_rows_that_are_not_packed_do_not_share():
    assert TRIE not in cut(CHAIN, budget=20, packed=False)


@pytest.mark.parametrize("name", ["prepare_model_inputs", "prepare_model_outputs", "forward_step"])
def test_an_engine_that_may_read_fields_which_are_not_compared_is_refused(name):
    def with_adapters(self, *args, **kwargs):
        raise NotImplementedError

    refused = type("WithAdapters", (FSDPEngineWithLMHead,), {name: with_adapters})
    (incompatibility,) = engine_incompatibilities(object.__new__(padded(refused)))
    assert (name in incompatibility.why, incompatibility.setting) == (True, "engine=WithAdapters")
    verls = functools.wraps(getattr(FSDPEngineWithLMHead, name))(with_adapters)
    profiled = type("Profiled", (FSDPEngineWithLMHead,), {name: verls})
    assert not [*engine_incompatibilities(object.__new__(padded(profiled)))]


@pytest.mark.parametrize(
    "engine", [FSDPEngineWithLMHead, FSDPEngineWithValueHead, FSDPTurboEngineWithLMHead]
)
def test_verls_own_engines_are_not(engine):
    assert not [*engine_incompatibilities(object.__new__(padded(engine)))]
