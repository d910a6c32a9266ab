"""verl's Megatron engines behind the mixin that has rows share; what it computes is in
tests/equivalence/test_sharing_on_megatron.py."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from verl_padding.prefix_sharing.engine import engine_incompatibilities
from verl_padding.worker.megatron_engine import BRANCH_WITH, limit_of_settings, limit_of_stage
from verl_padding.worker.padded_engine import padded

OF_MEGATRON = pytest.mark.megatron


def test_a_setting_that_is_missing_or_another_limits_rows_that_branch():
    known = {name: admitted[0] for name, admitted in BRANCH_WITH.items()}
    for name, admitted in BRANCH_WITH.items():
        for value in admitted:
            assert limit_of_settings(SimpleNamespace(**known | {name: value})) is None
        assert name in limit_of_settings(SimpleNamespace(**known | {name: "another"}))
        others = {other: value for other, value in known.items() if other != name}
        assert name in limit_of_settings(SimpleNamespace(**others))


@pytest.fixture
def verls():
    from verl.workers.engine.megatron import transformer_impl

    return transformer_impl


@OF_MEGATRON
def test_verls_own_engines_share(verls):
    for engine in (verls.MegatronEngineWithLMHead, verls.MegatronEngineWithValueHead):
        assert not [*engine_incompatibilities(object.__new__(padded(engine)))]


@OF_MEGATRON
@pytest.mark.parametrize(
    "name",
    [
        "prepare_model_inputs",
        "prepare_model_outputs",
        "forward_step",
        "postprocess_micro_batch_func",
        "_lm_head_logits_processor",
    ],
)
def test_an_engine_that_may_read_fields_which_are_not_compared_does_not(name, verls):
    own = {name: lambda self, *args, **kwargs: None}
    engine = type("WithAdapters", (verls.MegatronEngineWithLMHead,), own)
    (incompatibility,) = engine_incompatibilities(object.__new__(padded(engine)))
    assert (name in incompatibility.why, incompatibility.setting) == (True, "engine=WithAdapters")


@OF_MEGATRON
def test_settings_with_which_rows_that_branch_share_are_megatrons():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    known = {field.name: field.default for field in fields(MLATransformerConfig)}
    assert BRANCH_WITH.keys() <= known.keys()
    # All but these are what Megatron has by itself.
    bridged = {"multi_latent_attention", "attention_dropout"}
    assert {name for name in BRANCH_WITH if known[name] not in BRANCH_WITH[name]} == bridged


@pytest.fixture
def stage():
    """A stage of Megatron's own layers, on a rank alone."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, attention_dropout=0.0, use_cpu_initialization=True)
    rotary = {"position_embedding_type": "rope"}
    yield GPTModel(config, get_gpt_layer_local_spec(), 16, 16, **rotary)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def with_another_core(stage, attention):
    attention.core_attention.__class__ = type(
        "Sinks", (type(attention.core_attention),), {"forward": lambda self: None}
    )


def with_a_forward_of_its_own(stage, attention):
    attention.core_attention.forward = lambda *args: None


def with_another_mask(stage, attention):
    attention.attn_mask_type = type(attention.attn_mask_type).no_mask


def with_other_attention(stage, attention):
    attention.__class__ = type("Turned", (type(attention),), {})


def with_another_block(stage, attention):
    stage.decoder.__class__ = type("Looped", (type(stage.decoder),), {})


def with_stacked_frequencies(stage, attention):
    stage.rotary_pos_emb.__class__ = type("Stacked", (type(stage.rotary_pos_emb),), {})


def with_a_setting_of_a_layer(stage, attention):
    attention.core_attention.config = replace(attention.config, softmax_type="learnable")


@OF_MEGATRON
@pytest.mark.parametrize(
    "change",
    [
        with_another_core,
        with_a_forward_of_its_own,
        with_another_mask,
        with_other_attention,
        with_another_block,
        with_stacked_frequencies,
        with_a_setting_of_a_layer,
    ],
)
def test_a_layer_that_may_compute_something_else_limits_its_stage(change, stage):
    assert limit_of_stage(stage) is None
    change(stage, stage.decoder.layers[-1].self_attention)
    assert limit_of_stage(stage)
