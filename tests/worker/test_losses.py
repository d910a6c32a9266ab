"""What the wrapped loss hands on and reports; each of verl's losses in it is tested in
tests/equivalence."""

import math

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric

from tests.support.losses_on_rows import (
    LAYOUTS,
    PAD,
    Rows,
    critic_loss,
    nested,
    policy_loss,
    run_as_verl_does,
)
from tests.support.tolerance import RELATIVE_FLOAT32
from verl_padding.pads import columns
from verl_padding.worker.losses import MICRO_BATCHES, PACKING_EFFICIENCY, RealRowsLoss

LOSSES = {"log_probs": policy_loss, "values": critic_loss}
"""Model output -> verl's loss on it."""


def test_a_micro_batch_of_pads_gives_a_zero_with_a_gradient():
    def forbidden(**kwargs):
        raise AssertionError("called")

    rows = Rows()
    output, data = rows.micro_batch(
        [PAD, PAD], [], "log_probs", dp_size=2, real_rows=5, reporting_ranks=1
    )
    loss, metrics = RealRowsLoss(forbidden, "rows")(model_output=output, data=data)
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert list(metrics) == [MICRO_BATCHES]
    loss.backward()


@pytest.mark.parametrize("leaves_out", [False, True])
def test_the_first_mini_batch_reports_its_losses_if_no_row_trains(leaves_out):
    rows = Rows()
    output, data = rows.micro_batch(
        [PAD, PAD], [], "log_probs", dp_size=2, real_rows=5, reporting_ranks=0
    )
    data[columns.ALL_LOSS_TOKENS] = torch.full((2,), 4)
    tu.assign_non_tensor(data, **{columns.LEAVES_OUT: leaves_out})
    _, metrics = RealRowsLoss(policy_loss("token-mean"), "rows")(model_output=output, data=data)
    # Of a mini-batch whose rows are left out but for one that is not trained, tokens that are not
    # clipped are known.
    fractions = {"actor/pg_clipfrac", "actor/pg_clipfrac_lower"} if leaves_out else set()
    reported = {
        name: sum(metric.values) for name, metric in metrics.items() if name.startswith("actor/")
    }
    assert reported == dict.fromkeys({"actor/pg_loss", *fractions}, 0.0)


@pytest.mark.parametrize(("held", "tokens"), [([0, 2, PAD], 7 + 8), ([1], 6), ([PAD, PAD], 0)])
def test_a_micro_batch_tells_of_itself_and_how_full_it_is_with_real_rows(held, tokens):
    rows = Rows()
    output, data = rows.micro_batch(
        held, rows.leaves(), "log_probs", dp_size=2, real_rows=5, reporting_ranks=1
    )
    lengths = [
        len(p) + len(r)
        for p, r in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
    ]
    data["input_ids"] = nested(torch.ones(length, dtype=torch.int64) for length in lengths)
    # Ulysses: two GPUs share a row, and so do they a budget of 10 tokens each.
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=10, sp_size=2)
    _, metrics = RealRowsLoss(policy_loss("token-mean"), "rows")(model_output=output, data=data)
    told = {name: metrics[name] for name in (MICRO_BATCHES, PACKING_EFFICIENCY)}
    assert {name: (metric.aggregation, metric.values) for name, metric in told.items()} == {
        MICRO_BATCHES: (AggregationType.SUM, [1.0]),
        PACKING_EFFICIENCY: (AggregationType.MEAN, [tokens / 20]),
    }


class RowsWithRejectedTokens(Rows):
    """Rows of which rejection sampling kept some tokens: verl then writes response masks anew, and
    no loss masks."""

    KEPT = ((0, 1, 1, 0), (0,), (1, 1, 1, 1, 0, 0), (0, 1), (1, 0, 1))

    def __init__(self):
        super().__init__()
        for row, kept in zip(self.fields, self.KEPT, strict=True):
            row["response_mask"] = torch.tensor(kept)


@LAYOUTS
@pytest.mark.parametrize("output_name", ["log_probs", "values"])
def test_after_rejection_sampling_the_kept_tokens_weigh_in_a_metric(output_name, layout):
    rows, loss = RowsWithRejectedTokens(), LOSSES[output_name]("token-mean")
    n = rows.n_real
    output, data = rows.micro_batch(
        range(n), rows.leaves(), output_name, dp_size=1, real_rows=n, reporting_ranks=1, nominal=n
    )
    want = loss(model_output=output, data=data, dp_group=None)[1]
    _, got = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, layout, output_name)
    for name, value in want.items():
        number = value.aggregate() if isinstance(value, Metric) else value
        assert math.isclose(got[name], number, rel_tol=RELATIVE_FLOAT32, abs_tol=1e-12), name


def test_a_batch_without_the_columns_reaches_the_inner_loss_untouched():
    seen = {}
    data = TensorDict({"x": torch.zeros(2)}, batch_size=2)
    RealRowsLoss(lambda **kwargs: seen.update(kwargs), "rows")(
        model_output={}, data=data, dp_group=None
    )
    assert seen["data"] is data


def test_top_k_distillation_is_asked_for_its_token_values_first():
    seen = {}
    RealRowsLoss(lambda **kwargs: seen.update(kwargs), "rows")(student_logits="logits", data="data")
    assert seen["student_logits"] == "logits"
    assert seen["data"] == "data"
