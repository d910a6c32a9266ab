"""A loss that sees only rows that train: it wraps whatever loss a worker has, and weights its
metrics.

verl appends the metrics of a rank's micro-batches, takes the mean over ranks, then the mean or the
sum over micro-batches, all with equal weights and equal counts. A micro-batch without a trained
token has nothing to report, and one of two rows counts like one of twenty. Here each metric is one
running number per rank, so that counts agree, and is already weighted, so that a plain mean over
the reporting ranks gives the mini-batch's value.
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from verl_padding.pads.planned_call import (
    BATCH_ROW,
    CALL,
    IS_PADDING,
    MINI_BATCH,
    MiniBatch,
    PlannedCall,
    read_column,
)

MICRO_BATCHES = "padding/micro_batches"
"""Metric of a worker: micro-batches of a mini-batch."""

PREFIX = "verl_padding/"
"""Prefix of our policy losses in verl's registry."""
ROW_MEAN = "geo_mean"
"""verl 0.9 adds this loss up over micro-batches and takes its mean over ranks, each with equal
weight, so a row weighs more the fewer rows its micro-batch holds. A mean of r of the mini-batch's R
rows is r / R of its mean."""

# Only its name says what a metric of verl is: an extreme, as in reduce_metrics, or a mean over
# rows, as the metrics of a rollout correction that are perplexities or of sequences. All other
# means are over tokens. The option of a rejection says nothing about that, except in the fractions
# of rejected rows: rollout_rs_seq_max_k2_mean is a mean over tokens, and
# rollout_rs_seq_max_k2_fraction_high over rows.
_OPTION = re.compile(r"(rollout_rs)_(token|seq)(?:_sum|_mean|_max)?_k[123](_.*)")
_EXTREME = re.compile(r"(?:^|[_/])(min|max)(?:_deviation)?$|/(min|max)_")
_OF_ROWS = re.compile(r"(?:^|[_/])(?:ppl|seq)(?:$|_)")


class RealRowsLoss:
    """Hands ``inner`` the real rows of a micro-batch that have a trained token, with its
    mini-batch's denominators.

    Pads have none, and neither have real rows whose ``response_mask`` is all 0; those that have
    lost their tokens to a rejection, and have a ``loss_mask``, stay in the denominators. A
    micro-batch without a trained token gets a zero that depends on the model's output, so that its
    backward runs the same collectives as on the other ranks; ``inner`` is not called. Beside the
    inner loss's metrics, every micro-batch reports a count of one. A mini-batch
    without a trained token reports 0 for verl's policy loss, and for each loss that ``inner`` has
    reported before.

    Rows that weigh differently bring a factor (:mod:`~verl_padding.pads.loss_weighting`), by which
    the gradient of their outputs is multiplied. Loss and metrics are those of rows that weigh the
    same.

    Of an update that may leave zero-advantage rows out, denominators are those of all rows, and so
    are losses, in which such rows count nothing; other metrics are of the computed rows, and named
    so.
    """

    def __init__(self, inner: Callable[..., Any]):
        self.inner = normalize_over_mini_batch(inner)
        # Losses that a mini-batch without a trained token reports as 0: those that ``inner`` has
        # reported before, and from the first mini-batch on the one that verl's is known to have.
        is_verls = isinstance(inner, partial) and inner.func is ppo_loss
        self._reported_losses: set[str] = {"actor/pg_loss"} if is_verls else set()

    def __call__(
        self, model_output: dict[str, Any] | None = None, data: TensorDict = None, **kwargs: Any
    ) -> Any:
        """Loss (scalar) and metrics of one micro-batch of ``len(data)`` rows; see verl's
        ``ppo_loss``."""
        if model_output is None or MINI_BATCH not in data:
            # Top-k distillation asks the loss for per-token values first, those of pads included;
            # nothing is summed.
            return self.inner(model_output=model_output, data=data, **kwargs)
        mini_batch: MiniBatch = data[MINI_BATCH]
        real_R = ~read_column(data, IS_PADDING).bool()
        has_token_R = torch.stack([mask.any() for mask in data["response_mask"].unbind()])
        trained = (real_R & has_token_R).nonzero().flatten().tolist()
        # Plain, one value a micro-batch: every rank has as many.
        counted = {MICRO_BATCHES: Metric(AggregationType.SUM, 1.0)}
        if not trained:
            if mini_batch.reporting_ranks == 0:  # where some rank trains, it alone reports losses
                counted |= {
                    name: RunningMetric(AggregationType.SUM, 0.0) for name in self._reported_losses
                }
            return _connected_zero(model_output), counted
        if len(trained) < len(data):
            model_output = {
                name: _select(value, trained, len(data)) for name, value in model_output.items()
            }
            data = tu.index_select_tensor_dict(data, trained)
        # The denominators of its mini-batch, by verl's names.
        if mini_batch.rows_with_loss is not None:
            tu.assign_non_tensor(data, global_batch_size=mini_batch.rows_with_loss)
        if mini_batch.all_loss_tokens is not None:
            tu.assign_non_tensor(data, batch_num_tokens=mini_batch.all_loss_tokens)
        call: PlannedCall = data[CALL]
        if call.factor_R is not None:
            # The column may be on a GPU by now, the numbers of the call are not.
            factors = [call.factor_R[row] for row in read_column(data, BATCH_ROW).tolist()]
            factor_R = torch.tensor(factors, dtype=torch.float64)
            model_output = {
                name: scale_gradient(value, factor_R) for name, value in model_output.items()
            }
        if call.takes_own_log_probs:
            data["old_log_probs"] = response_from_nested(
                model_output["log_probs"].detach(), data["response_mask"]
            )
        loss, metrics = self.inner(model_output=model_output, data=data, **kwargs)
        self._reported_losses.update(
            name for name, value in metrics.items() if _aggregation(value) is AggregationType.SUM
        )
        return loss, _weighted_metrics(metrics, data, mini_batch) | counted


def _connected_zero(model_output: dict[str, Any]) -> torch.Tensor:
    grads = [v for v in model_output.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    # One is enough: every output comes from the same forward pass.
    assert grads, f"no model output with a gradient among {sorted(model_output)}"
    values = grads[0].values() if grads[0].is_nested else grads[0]
    # The sum of no values, not of all values times zero: that would be NaN if a pad's output is not
    # finite.
    return values.flatten()[:0].sum()


def _select(value: Any, rows: list[int], n_rows: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_nested:
        parts = value.unbind()
        return tu.nested_tensor_from_tensor_list([parts[row] for row in rows], ragged_idx=1)
    assert value.shape[0] == n_rows, f"model output of shape {tuple(value.shape)} for {n_rows} rows"
    return value[rows]


def scale_gradient(value: Any, factor_R: torch.Tensor) -> Any:
    """The same output, of which the gradient of row r is multiplied by ``factor_R[r]``."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    if value.is_nested:
        flat, offsets = value.values(), value.offsets()
        factors = factor_R.repeat_interleave(offsets.diff())
    else:
        flat, offsets, factors = value.view_as(value), None, factor_R
    # In bfloat16 a factor of 1/3 would be 0.2 % off.
    dtype = torch.promote_types(flat.dtype, torch.float32)
    factors = factors.to(device=flat.device, dtype=dtype).reshape(-1, *[1] * (flat.ndim - 1))
    # A row that weighs nothing adds nothing, even if its gradient is not finite.
    flat.register_hook(
        lambda gradient: torch.where(factors == 0, 0.0, gradient * factors).to(gradient.dtype)
    )
    return flat if offsets is None else torch.nested.nested_tensor_from_jagged(flat, offsets)


@register_policy_loss(PREFIX + ROW_MEAN)
def share_of_mini_batch(
    *, response_mask: torch.Tensor, config: Any, **arguments: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's policy loss that takes the mean of the rows it gets, as its share of the mini-batch's
    mean."""
    mean, metrics = get_policy_loss_fn(ROW_MEAN)(
        response_mask=response_mask, config=config, **arguments
    )
    info = config.global_batch_info
    # Times the ranks, as verl's other losses are: FSDP takes the mean over them.
    return mean * (len(response_mask) * info["dp_size"] / info["global_batch_size"]), metrics


def normalize_over_mini_batch(loss: Any) -> Any:
    """verl's actor loss with its policy loss replaced if that is a mean of rows; any other loss
    stays as it is."""
    config = loss.keywords.get("config") if isinstance(loss, partial) else None
    policy_loss = getattr(config, "policy_loss", None)
    if policy_loss is None or policy_loss.loss_mode != ROW_MEAN:
        return loss
    config, policy_loss = copy.copy(config), copy.copy(policy_loss)
    object.__setattr__(policy_loss, "loss_mode", PREFIX + ROW_MEAN)  # verl's configs are frozen
    object.__setattr__(config, "policy_loss", policy_loss)
    return partial(loss.func, *loss.args, **{**loss.keywords, "config": config})


class RunningMetric(Metric):
    """A metric that keeps one number for a rank's micro-batches so far: their sum, minimum or
    maximum."""

    values: list[float]

    def append(self, value: Any) -> None:
        super().append(value)
        if len(self.values) > 1:
            self.values = [self._aggregate(self.values, self.aggregation)]

    def init_list(self) -> Metric:
        return RunningMetric(aggregation=self.aggregation)


def _aggregation(metric: Any) -> AggregationType:
    return metric.aggregation if isinstance(metric, Metric) else AggregationType.MEAN


def _weighted_metrics(
    metrics: dict[str, Any], data: TensorDict, mini_batch: MiniBatch
) -> dict[str, Any]:
    """What a micro-batch's metrics add to those of its mini-batch.

    Sums (losses, which verl scales by the data-parallel size) stay sums; means become weighted
    sums, of tokens or, by their name, of rows; extremes stay extremes. What cannot be added up (a
    standard deviation) becomes the mean of the micro-batches', as in verl. Only the ranks that hold
    a trained token of the mini-batch report metrics. All but sums are of the computed rows, and
    named so where an update may leave rows out.
    """
    # Of a mini-batch's 120 trained tokens, 90 are on one of two ranks, in one micro-batch with a
    # mean of 0.4, and 30 on the other, with 0.8: shares of 0.4 x 3/4 x 2 and 0.8 x 1/4 x 2, whose
    # mean over the ranks, 0.5, is that of all tokens.
    ranks, shared = mini_batch.reporting_ranks, {}
    share_of = {
        "tokens": int(data["response_mask"].sum()) / mini_batch.trained_tokens,
        "rows": len(data) / mini_batch.trained_rows,
    }
    for name, value in metrics.items():
        aggregation = _aggregation(value)
        number = float(value.aggregate() if isinstance(value, Metric) else value)
        if aggregation is AggregationType.SUM:
            # verl takes the mean of the ranks' sums. Absent ranks would add a zero to that mean.
            shared[name] = RunningMetric(aggregation, number * ranks / int(data["dp_size"]))
            continue
        if aggregation is AggregationType.MEAN:
            kind = _kind_of_mean(name)
            if kind in share_of:
                aggregation = AggregationType.SUM
                number *= share_of[kind] * ranks
            else:
                aggregation = AggregationType(kind)
        own_name = name if mini_batch.all_loss_tokens is None else f"{name}_computed"
        shared[own_name] = RunningMetric(aggregation, number)
    return shared


def _kind_of_mean(name: str) -> str:
    """``min`` or ``max`` for an extreme, else what the mean is over: ``rows`` or ``tokens``."""
    if option := _OPTION.search(name):
        if option[2] == "seq" and option[3].startswith("_fraction"):
            return "rows"
        name = option[1] + option[3]
    if extreme := _EXTREME.search(name):
        return extreme[1] or extreme[2]
    return "rows" if _OF_ROWS.search(name) else "tokens"
