"""A loss that is handed real rows only gives the gradient and the metrics of a batch without pads."""

import math
from functools import partial
from itertools import chain
from statistics import mean

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss

from tests.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.pads.queue import IS_PADDING, REAL_ROWS, REPORTING_RANKS
from verl_padding.trainer.losses import MICRO_BATCHES, RealRowsLoss

DP_SIZE = 2
PAD = "pad"
# [rank][micro-batch] -> rows; a micro-batch of pads alone, one mixed, one of real rows.
SPREAD = [[[0, PAD], [1, 2]], [[PAD, PAD], [3, 4]]]
IDLE_RANK = [[[0, 1], [2, 3, 4]], [[PAD, PAD], [PAD]]]
LAYOUTS = pytest.mark.parametrize("layout", [SPREAD, IDLE_RANK], ids=["spread", "idle_rank"])
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


class Rows:
    """Five real rows and any number of pads, with everything that verl's losses read, in float64."""

    def __init__(self, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.lengths = [(3, 4), (5, 1), (2, 6), (4, 2), (1, 3)]
        self.fields = [self._row(prompt, response, gen) for prompt, response in self.lengths]
        self.n_real = len(self.fields)

    @staticmethod
    def _row(prompt, response, gen):
        def draw(n, scale=1.0):
            return torch.randn(n, generator=gen, dtype=torch.float64) * scale

        old = -draw(response).abs()
        return {
            "output": (-draw(prompt + response).abs()),
            "prompts": torch.ones(prompt, dtype=torch.int64),
            "responses": torch.ones(response, dtype=torch.int64),
            "response_mask": torch.ones(response, dtype=torch.int64),
            "loss_mask": torch.ones(response, dtype=torch.int64),
            "old_log_probs": old,
            "ref_log_prob": old + draw(response, 0.1),
            "rollout_log_probs": old + draw(response, 0.1),
            "advantages": draw(response),
            "values": draw(response),
            "returns": draw(response),
        }

    def pad(self):
        row = self._row(1, 1, torch.Generator().manual_seed(9))
        zeros = torch.zeros(1, dtype=torch.float64)
        mask = torch.zeros(1, dtype=torch.int64)
        for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages", "values", "returns"):
            row[name] = zeros
        return row | {"response_mask": mask, "loss_mask": mask}

    def leaves(self):
        return [row["output"].clone().requires_grad_() for row in self.fields]

    def micro_batch(self, rows, leaves, output_name, *, dp_size, real_rows, reporting_ranks, nominal=7):
        picked = [self.pad() if row is PAD else self.fields[row] for row in rows]
        outputs = [
            row["output"].clone().requires_grad_() if name is PAD else leaves[name]
            for name, row in zip(rows, picked, strict=True)
        ]
        names = [name for name in picked[0] if name != "output"]
        data = TensorDict({name: nested(row[name] for row in picked) for name in names}, batch_size=len(rows))
        data[IS_PADDING] = torch.tensor([row is PAD for row in rows])
        data[REAL_ROWS] = torch.full((len(rows),), real_rows)
        data[REPORTING_RANKS] = torch.full((len(rows),), reporting_ranks)
        tokens = sum(response for _, response in self.lengths)
        tu.assign_non_tensor(data, dp_size=dp_size, batch_num_tokens=tokens, global_batch_size=nominal)
        output = {output_name: nested(outputs)}
        if output_name == "log_probs":
            output["entropy"] = nested(o * o for o in outputs)
        return output, data


def losses(mode):
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        loss_scale_factor=8,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        entropy_coeff=0.2,
    )
    critic = FSDPCriticConfig(
        strategy="fsdp2", use_dynamic_bsz=True, loss_agg_mode=mode, loss_scale_factor=8, cliprange_value=0.5
    )
    return {"log_probs": partial(ppo_loss, config=actor), "values": partial(value_loss, config=critic)}


def run_as_verl_does(loss, rows, layout, output_name, nominal=7):
    """Gradients and metrics of one optimizer step, as verl's engine, worker and trainer add them up."""
    leaves = rows.leaves()
    real_rows = sum(row is not PAD for rank in layout for micro in rank for row in micro)
    reporting = sum(any(row is not PAD for micro in rank for row in micro) for rank in layout)
    by_rank = []
    for rank in layout:
        metrics = {}
        for micro in rank:
            output, data = rows.micro_batch(
                micro,
                leaves,
                output_name,
                dp_size=len(layout),
                real_rows=real_rows,
                reporting_ranks=reporting,
                nominal=nominal,
            )
            value, micro_metrics = loss(model_output=output, data=data, dp_group=None)
            (value / len(layout)).backward()  # FSDP averages gradients over the ranks
            append_to_dict(metrics, micro_metrics)
        by_rank.append(metrics)
    gathered = {}
    for metrics in by_rank:
        for name, value in metrics.items():
            gathered.setdefault(name, []).append(value)
    reduced = {
        name: Metric.aggregate_dp(v) if isinstance(v[0], Metric) else mean(chain.from_iterable(v))
        for name, v in gathered.items()
    }
    return [leaf.grad for leaf in leaves], reduced


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output_name", ["log_probs", "values"])
def test_gradients_and_metrics_are_those_of_the_real_rows_on_one_rank(mode, output_name, layout):
    rows, loss = Rows(), losses(mode)[output_name]
    want_grads, want_metrics = run_as_verl_does(
        RealRowsLoss(loss, "rows"), rows, [[list(range(rows.n_real))]], output_name
    )
    got_grads, got_metrics = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, layout, output_name)
    assert any(grad.abs().max() > 0 for grad in want_grads)
    for got, want in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=RELATIVE_FLOAT64, atol=1e-15)
    assert got_metrics.keys() == want_metrics.keys()
    assert (want_metrics.pop(MICRO_BATCHES), got_metrics[MICRO_BATCHES]) == (1, len(layout[0]))
    assert len(want_metrics) >= 3
    for name, want in want_metrics.items():
        assert math.isclose(got_metrics[name], want, rel_tol=RELATIVE_FLOAT32, abs_tol=1e-12), name


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_of_real_rows_is_verls_own_loss_with_their_number_as_batch_size(mode):
    rows, loss = Rows(), losses(mode)["log_probs"]
    leaves = rows.leaves()
    output, data = rows.micro_batch(range(5), leaves, "log_probs", dp_size=1, real_rows=5, reporting_ranks=1, nominal=5)
    want, want_metrics = loss(model_output=output, data=data, dp_group=None)
    want.backward()
    grads, metrics = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, [[list(range(5))]], "log_probs")
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=RELATIVE_FLOAT64, atol=1e-15)
    for name, value in want_metrics.items():
        number = value.aggregate() if isinstance(value, Metric) else value
        assert math.isclose(metrics[name], number, rel_tol=RELATIVE_FLOAT32), name


def test_the_nominal_denominator_is_the_one_that_verl_sends():
    rows, loss = Rows(), losses("seq-mean-token-sum")["values"]
    by_rows, _ = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, SPREAD, "values")
    nominal, _ = run_as_verl_does(RealRowsLoss(loss, "nominal"), rows, SPREAD, "values")
    for a, b in zip(by_rows, nominal, strict=True):
        torch.testing.assert_close(a * 5, b * 7, rtol=RELATIVE_FLOAT64, atol=1e-15)


def test_a_micro_batch_of_pads_gives_a_zero_with_a_gradient_and_calls_no_loss():
    def forbidden(**kwargs):
        raise AssertionError("called")

    rows = Rows()
    output, data = rows.micro_batch([PAD, PAD], [], "log_probs", dp_size=2, real_rows=5, reporting_ranks=1)
    loss, metrics = RealRowsLoss(forbidden, "rows")(model_output=output, data=data)
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert list(metrics) == [MICRO_BATCHES]
    loss.backward()


def test_a_batch_without_the_columns_reaches_the_inner_loss_untouched():
    seen = {}
    data = TensorDict({"x": torch.zeros(2)}, batch_size=2)
    RealRowsLoss(lambda **kwargs: seen.update(kwargs), "rows")(model_output={}, data=data, dp_group=None)
    assert seen["data"] is data


def test_top_k_distillation_is_asked_for_its_token_values_first():
    seen = {}
    RealRowsLoss(lambda **kwargs: seen.update(kwargs), "rows")(student_logits="logits", data="data")
    assert seen["student_logits"] == "logits"
    assert seen["data"] == "data"
