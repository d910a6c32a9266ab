"""Which engines are given linear attention that takes packed rows one by one."""

from types import SimpleNamespace

import pytest

from tests.support.hybrid_models import hybrid_model
from verl_padding.prefix_sharing.linear_attention import RULE, linear_layers
from verl_padding.prefix_sharing.tree import TREE
from verl_padding.worker import linear_attention

PACKS = {"strategy": "fsdp2", "use_remove_padding": True, "ulysses_sequence_parallel_size": 1}


class Engine(SimpleNamespace):
    def prepare_model_inputs(self, micro_batch): ...

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func): ...

    def forward_backward_batch(self): ...


@pytest.mark.parametrize(
    ("differs", "follows"),
    [
        ({}, True),
        ({"strategy": "fsdp"}, True),
        ({"strategy": "veomni"}, False),
        ({"use_remove_padding": False}, False),
        ({"ulysses_sequence_parallel_size": 2}, False),
    ],
)
def test_it_is_given_to_fsdp_engines_that_pack_whole_rows(differs, follows):
    model = hybrid_model("qwen3_next")
    config = SimpleNamespace(**PACKS | differs)
    trained = SimpleNamespace(engine=Engine(module=model), engine_config=config)
    linear_attention.install_in_worker(SimpleNamespace(actor=trained))
    layers = list(linear_layers(model))
    assert len(layers) == 2
    assert {hasattr(getattr(layer, RULE), TREE) for layer in layers} == {follows}
