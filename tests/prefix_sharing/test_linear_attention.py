"""Pieces of a trie's segments, and what a convolution reads of its paths."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from tests.support.hybrid_models import hybrid_model
from verl_padding.prefix_sharing.linear_attention import (
    cut_pieces,
    linear_layers,
)
from verl_padding.prefix_sharing.prefix_trie import TRIE, build_trie
from verl_padding.worker.padded_engine import padded

CPU = torch.device("cpu")


def test_pieces_end_where_others_branch_off_before_the_token_that_they_copy():
    # [5, 6, 7, 9, 9] and, after a copy of the third token, [7, 8].
    trie = build_trie([5, 4], [0, 1], [0, 3])
    first, second = cut_pieces(trie, 7, CPU).levels
    assert first.lengths == [2]
    assert second.lengths == [3, 2]
    assert second.parents.tolist() == [0, 0]
    assert second.ends.tolist() == [0, 3, 5]


class Engine(FSDPEngine):
    """Looks at what its layers follow, and fails."""

    def __init__(self, module):
        self.module, self.engine_config = module, SimpleNamespace()

    def prepare_model_inputs(self, micro_batch):
        return {}, {}

    def prepare_model_outputs(self, *arguments):
        raise NotImplementedError

    def forward_backward_batch(self, micro_batch, loss_function, forward_only):
        self.prepare_model_inputs(micro_batch)
        self.followed = [getattr(layer, TRIE) for layer in linear_layers(self.module)]
        raise ValueError("out of memory")


def test_linear_layers_let_go_of_a_trie_though_the_pass_has_failed():
    engine = padded(Engine)(hybrid_model("qwen3_next"))
    engine.keep_rows_apart()
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    with pytest.raises(ValueError, match="out of memory"):
        engine.forward_backward_batch(
            TensorDict(
                {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)},
                batch_size=2,
            ),
            None,
        )
    layers = list(linear_layers(engine.module))
    assert len(engine.followed) == len(layers) > 0
    assert None not in engine.followed
    assert [getattr(layer, TRIE, None) for layer in layers] == [None] * len(layers)
