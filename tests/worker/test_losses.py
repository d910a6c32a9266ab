"""What the wrapped loss hands on and reports; each of verl's losses in it is tested in
tests/equivalence."""

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType

from tests.support.losses_on_rows import (
    PAD,
    Rows,
    nested,
    policy_loss,
)
from verl_padding.prefix_sharing.prefix_trie import TRIE, build_trie
from verl_padding.worker.losses import MICRO_BATCHES, PACKING_EFFICIENCY, RealRowsLoss


def test_a_micro_batch_of_pads_gives_a_zero_with_a_gradient():
    def forbidden(**kwargs):
        raise AssertionError("called")

    rows = Rows()
    output, data = rows.micro_batch(
        [PAD, PAD], [], "log_probs", dp_size=2, real_rows=5, reporting_ranks=1
    )
    loss, metrics = RealRowsLoss(forbidden)(model_output=output, data=data)
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert list(metrics) == [MICRO_BATCHES]
    loss.backward()


@pytest.mark.parametrize(
    ("held", "shared", "tokens"),
    [
        ([0, 2, PAD], [0, 0, 0], 7 + 8),
        ([1], [0], 6),
        ([PAD, PAD], [0, 0], 0),
        # The last of four tokens that two rows share is computed in both.
        ([0, 2, PAD], [0, 4, 0], 7 + 8 - 3),
    ],
)
def test_a_micro_batch_tells_of_itself_and_how_full_it_is_with_real_rows(held, shared, tokens):
    rows = Rows()
    output, data = rows.micro_batch(
        held, rows.leaves(), "log_probs", dp_size=2, real_rows=5, reporting_ranks=1
    )
    lengths = [
        len(p) + len(r)
        for p, r in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
    ]
    data["input_ids"] = nested(torch.ones(length, dtype=torch.int64) for length in lengths)
    if any(shared):
        tu.assign_non_tensor_data(data, TRIE, build_trie(lengths, range(len(held)), shared))
    # Ulysses: two GPUs share a row, and so do they a budget of 10 tokens each.
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=10, sp_size=2)
    _, metrics = RealRowsLoss(policy_loss("token-mean"))(model_output=output, data=data)
    told = {name: metrics[name] for name in (MICRO_BATCHES, PACKING_EFFICIENCY)}
    assert {name: (metric.aggregation, metric.values) for name, metric in told.items()} == {
        MICRO_BATCHES: (AggregationType.SUM, [1.0]),
        PACKING_EFFICIENCY: (AggregationType.MEAN, [tokens / 20]),
    }


def test_top_k_distillation_is_asked_for_its_token_values_first():
    seen = {}
    RealRowsLoss(lambda **kwargs: seen.update(kwargs))(student_logits="logits", data="data")
    assert seen["student_logits"] == "logits"
    assert seen["data"] == "data"
