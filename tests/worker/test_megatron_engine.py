"""verl's Megatron engines behind the mixin that has rows share; what it computes is in
tests/equivalence/test_sharing_on_megatron.py."""

from dataclasses import fields

import pytest

from verl_padding.job.megatron_forks import FORK_WITH
from verl_padding.prefix_sharing.engine import engine_blockers
from verl_padding.worker.padded_engine import padded

pytestmark = [pytest.mark.megatron]


@pytest.fixture
def verls():
    from verl.workers.engine.megatron import transformer_impl

    return transformer_impl


def test_verls_own_engines_share(verls):
    for engine in (verls.MegatronEngineWithLMHead, verls.MegatronEngineWithValueHead):
        assert not [*engine_blockers(object.__new__(padded(engine)))]


@pytest.mark.parametrize("name", ["prepare_model_inputs", "prepare_model_outputs", "forward_step"])
def test_an_engine_that_may_read_fields_which_are_not_compared_does_not(name, verls):
    own = {name: lambda self, *args, **kwargs: None}
    engine = type("WithAdapters", (verls.MegatronEngineWithLMHead,), own)
    (blocker,) = engine_blockers(object.__new__(padded(engine)))
    assert (name in blocker.why, blocker.setting) == (True, "engine=WithAdapters")


def test_settings_with_which_rows_that_fork_share_are_megatrons():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    known = {field.name: field.default for field in fields(MLATransformerConfig)}
    assert FORK_WITH.keys() <= known.keys()
    # All but these are what Megatron has by itself.
    bridged = {"multi_latent_attention", "attention_dropout"}
    assert {name for name in FORK_WITH if known[name] not in FORK_WITH[name]} == bridged
