"""verl's policy loss that takes the mean of the rows it gets, turned into a share of the mini-batch's mean."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

PREFIX = "verl_padding/"
"""Prefix of its name in verl's registry."""

ROW_MEAN = "geo_mean"
"""verl 0.9 adds this loss up over micro-batches and takes its mean over ranks, each with equal weight, so a row weighs
more the fewer rows its micro-batch holds. A mean of r of the mini-batch's R rows is r / R of its mean."""


@register_policy_loss(PREFIX + ROW_MEAN)
def share_of_mini_batch(
    *, response_mask: torch.Tensor, config: Any, **arguments: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's loss of a micro-batch, as its share of the mini-batch's."""
    mean, metrics = get_policy_loss_fn(ROW_MEAN)(response_mask=response_mask, config=config, **arguments)
    info = config.global_batch_info
    # Times the ranks, as verl's other losses are: FSDP takes the mean over them.
    return mean * (len(response_mask) * info["dp_size"] / info["global_batch_size"]), metrics


def normalize_over_mini_batch(loss: Any) -> Any:
    """verl's actor loss with its policy loss replaced if that is a mean of rows; any other loss stays as it is."""
    config = loss.keywords.get("config") if isinstance(loss, partial) else None
    policy_loss = getattr(config, "policy_loss", None)
    if policy_loss is None or policy_loss.loss_mode != ROW_MEAN:
        return loss
    config, policy_loss = copy.copy(config), copy.copy(policy_loss)
    object.__setattr__(policy_loss, "loss_mode", PREFIX + ROW_MEAN)  # verl's configs are frozen
    object.__setattr__(config, "policy_loss", policy_loss)
    return partial(loss.func, *loss.args, **{**loss.keywords, "config": config})
