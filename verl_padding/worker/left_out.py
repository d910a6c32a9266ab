"""What only a worker shows of what is left out: that its loss is verl's, and its model draws
nothing in training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.verl_losses import losses_that
from verl_padding.worker.training_workers import for_training_workers


def check_left_out(padding: PaddingConfig) -> Callable[[Any], Any]:
    """For verl's ``execute_with_func_generator``, before the loss is wrapped.

    A PaddingConfigError if the actor's loss is not the one that is known to do without what the job
    leaves out, or its model gives other log-probs while it trains.
    """

    @for_training_workers
    def check(role: str, training_worker: Any) -> None:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.utils.losses import ppo_loss

        skips = padding.zero_advantage_rows == "skip"
        left_out = [f"padding.zero_advantage_rows={padding.zero_advantage_rows!r}"] if skips else []
        if not padding.recompute_old_log_probs:
            left_out.append("padding.recompute_old_log_probs=False")
        if role != "actor" or not left_out:
            return
        loss = training_worker.loss_fn
        admitted = losses_that(
            lambda each: each.is_zero_without_advantage if skips else each.reads_old_log_probs_alone
        )
        is_verls = isinstance(loss, partial) and loss.func is ppo_loss and "config" in loss.keywords
        if (
            is_verls
        ):  # what it calls may be another one by now, or the user's own under a name of verl's
            mode = loss.keywords["config"].policy_loss.loss_mode
            loss = get_policy_loss_fn(mode)
            is_verls = mode in admitted and loss.__module__.startswith("verl.")
        if not is_verls:
            raise PaddingConfigError(
                f"{left_out[0]}: the actor's loss is {loss!r}, which may add something for the "
                "rows, or read the log-probs, that are left out. Use a policy loss of verl's "
                f"that admits it, or leave {left_out[0]} out."
            )
        if not padding.recompute_old_log_probs and (where := _noise(training_worker.engine.module)):
            raise PaddingConfigError(
                f"{left_out[-1]}: the actor has {where} while it trains, so an update's log-probs "
                "are not those of a pass. Set it to 0, or padding.recompute_old_log_probs=True."
            )

    return check


def _noise(modules: Any) -> str | None:
    """A module of a model, or of the parts of one, that draws something while it trains; None if
    there is none."""
    for part in modules if isinstance(modules, list | tuple) else [modules]:
        for name, module in part.named_modules():
            rates = {
                each: rate
                for each, rate in vars(module).items()
                if "drop" in each or "jitter" in each
            }
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                rates["p"] = module.p
            for each, rate in rates.items():
                if isinstance(rate, float) and rate > 0:
                    return f"{name}.{each}={rate}"
    return None
