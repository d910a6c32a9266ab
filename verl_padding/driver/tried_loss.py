"""The actor's loss of a few tokens, with a job's settings: what it refuses of them, it refuses in the first update."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig

COMPLETED_BY_TRAINER = ("bypass_mode",)
"""Losses whose settings verl's trainer puts together when it starts."""


def try_policy_loss(config: DictConfig) -> None:
    """Computes the loss that the job names, if it is one of verl's own.

    Only refusals count: other errors may come from what these few tokens lack.

    Raises:
        AssertionError, ValueError: verl's; the loss refuses one of its settings.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    section = config.actor_rollout_ref.actor
    mode = section.policy_loss.loss_mode
    actor: Any
    try:
        loss, actor = get_policy_loss_fn(mode), omega_conf_to_dataclass(section)
    except (ValueError, InstantiationException):  # of which other checks tell
        return
    if mode in COMPLETED_BY_TRAINER or not loss.__module__.startswith("verl."):
        return
    log_prob = torch.linspace(-2.0, -1.0, 32).reshape(4, 8)
    with suppress(ArithmeticError, LookupError, RuntimeError, TypeError, AttributeError):
        loss(
            old_log_prob=log_prob,
            log_prob=log_prob,
            advantages=log_prob.flip(0) + 1.5,
            response_mask=torch.ones(4, 8),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
