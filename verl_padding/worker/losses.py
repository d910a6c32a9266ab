"""A loss that sees only rows that train: it wraps whatever loss a worker has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric

from verl_padding.config import Denominator
from verl_padding.pads.columns import (
    IS_PADDING,
    LOSS_FACTOR,
    LOSS_TOKENS,
    REAL_ROWS,
    REPORTING_RANKS,
    TRAINED_ROWS,
    WEIGHS_ROWS,
    read_column,
)
from verl_padding.worker.loss_metrics import RunningMetric, names_of_sums, share_metrics
from verl_padding.worker.row_means import normalize_over_mini_batch
from verl_padding.worker.shared_prefixes import computed_tokens
from verl_padding.worker.training_workers import for_training_workers

Loss = Callable[..., Any]

MICRO_BATCHES = "padding/micro_batches"
"""Metric of a worker: micro-batches of a mini-batch."""
PACKING_EFFICIENCY = "padding/packing_efficiency"
"""Metric of a worker: computed tokens of real rows over the token budget, as a mean over its micro-batches."""


class RealRowsLoss:
    """Hands ``inner`` the real rows of a micro-batch that have a trained token, with its mini-batch's denominators.

    Pads have none, and neither have real rows whose ``response_mask`` is all 0, which stay in the denominators. A
    micro-batch without a trained token gets a zero that depends on the model's output, so that its backward runs the
    same collectives as on the other ranks; ``inner`` is not called. Beside the inner loss's metrics, every micro-batch
    reports a count of one, and how full it is. A mini-batch without a trained token reports 0 for each loss that
    ``inner`` has reported before.

    Rows that weigh differently bring a factor (:mod:`~verl_padding.pads.loss_weighting`), by which the gradient of
    their outputs is multiplied. Loss and metrics are those of rows that weigh the same.

    Args:
        inner: verl's loss (actor, critic or distillation), or a user's.
        denominator: what seq-mean modes divide by, see :class:`~verl_padding.config.PaddingConfig`.
    """

    def __init__(self, inner: Loss, denominator: Denominator):
        self.inner = normalize_over_mini_batch(inner)
        self.denominator = denominator
        self._losses: set[str] = set()

    def __call__(self, model_output: dict[str, Any] | None = None, data: TensorDict = None, **kwargs: Any) -> Any:
        """Loss (scalar) and metrics of one micro-batch of ``len(data)`` rows; see verl's ``ppo_loss``."""
        if model_output is None or IS_PADDING not in data.keys():  # noqa: SIM118  (a TensorDict)
            # Top-k distillation asks the loss for per-token values first, those of pads included; nothing is summed.
            return self.inner(model_output=model_output, data=data, **kwargs)
        real_R = ~read_column(data, IS_PADDING).bool()
        has_token_R = torch.stack([mask.any() for mask in data["response_mask"].unbind()])
        trained = (real_R & has_token_R).nonzero().flatten().tolist()
        packing = _packing_metrics(data, real_R)
        if not trained:
            if int(read_column(data, REPORTING_RANKS)[0]) == 0:  # where some rank trains, it alone reports losses
                packing |= {name: RunningMetric(AggregationType.SUM, 0.0) for name in self._losses}
            return _connected_zero(model_output), packing
        if len(trained) < len(data):
            model_output = {name: _select(value, trained, len(data)) for name, value in model_output.items()}
            data = tu.index_select_tensor_dict(data, trained)
        if self.denominator == "rows":
            tu.assign_non_tensor(data, global_batch_size=int(read_column(data, REAL_ROWS)[0]))
        if tu.get_non_tensor_data(data=data, key=WEIGHS_ROWS, default=False):
            factor_R = read_column(data, LOSS_FACTOR)
            model_output = {name: weighted_output(value, factor_R) for name, value in model_output.items()}
        loss, metrics = self.inner(model_output=model_output, data=data, **kwargs)
        self._losses.update(names_of_sums(metrics))
        shared = share_metrics(
            metrics,
            of_tokens=int(data["response_mask"].sum()) / int(read_column(data, LOSS_TOKENS)[0]),
            of_rows=len(data) / int(read_column(data, TRAINED_ROWS)[0]),
            reporting_ranks=int(read_column(data, REPORTING_RANKS)[0]),
            dp_size=int(data["dp_size"]),
        )
        return loss, shared | packing


def _packing_metrics(data: TensorDict, real_R: torch.Tensor) -> dict[str, Metric]:
    # Plain metrics, one value a micro-batch: every rank has as many.
    metrics = {MICRO_BATCHES: Metric(AggregationType.SUM, 1.0)}
    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=False):
        budget = data["max_token_len_per_gpu"] * tu.get_non_tensor_data(data=data, key="sp_size", default=1)
        computed = sum(tokens for row, tokens in computed_tokens(data) if real_R[row])
        metrics[PACKING_EFFICIENCY] = Metric(AggregationType.MEAN, computed / budget)
    return metrics


def _connected_zero(model_output: dict[str, Any]) -> torch.Tensor:
    grads = [v for v in model_output.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    assert grads, f"no model output with a gradient among {sorted(model_output)}"
    # One is enough: every output comes from the same forward pass.
    values = grads[0].values() if grads[0].is_nested else grads[0]
    # The sum of no values, not of all values times zero: that would be NaN if a pad's output is not finite.
    return values.flatten()[:0].sum()


def _select(value: Any, rows: list[int], n_rows: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_nested:
        parts = value.unbind()
        return torch.nested.as_nested_tensor([parts[row] for row in rows], layout=torch.jagged)
    assert value.shape[0] == n_rows, f"model output of shape {tuple(value.shape)} for {n_rows} rows"
    return value[rows]


def weighted_output(value: Any, factor_R: torch.Tensor) -> Any:
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
    flat.register_hook(lambda gradient: torch.where(factors == 0, 0.0, gradient * factors).to(gradient.dtype))
    return flat if offsets is None else torch.nested.nested_tensor_from_jagged(flat, offsets)


def wrap_worker_loss(denominator: Denominator) -> Callable[[Any], Any]:
    """Makes a function for verl's ``execute_with_func_generator`` that wraps each worker's loss, in the worker."""

    def wrap(role: str, trainee: Any) -> None:
        if role != "ref":
            assert trainee.loss_fn is not None, "the worker has no loss yet"
            trainee.set_loss_fn(RealRowsLoss(trainee.loss_fn, denominator))

    return for_training_workers(wrap)
