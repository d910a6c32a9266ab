"""Settings that verl's own functions reject in the first step, tried on two made rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig

from verl_padding.cli.doctor.finding import Finding, wrong
from verl_padding.job.verl_losses import LOSS_MODE, verls_own


def rejected_settings(config: DictConfig) -> Iterator[Finding]:
    """What verl's sampling, loss and correction raise."""
    for section, trial in _trials(config):
        try:
            trial()
        except Exception as error:  # of verl, torch or transformers
            why = " ".join(str(error).split()) or type(error).__name__
            yield wrong(section, f"{why.rstrip('.')}. Correct it.")


def _trials(config: DictConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.config import omega_conf_to_dataclass

    rollout = config.actor_rollout_ref.rollout
    yield "actor_rollout_ref.rollout", lambda: TemperatureLogitsWarper(float(rollout.temperature))
    yield "actor_rollout_ref.rollout", lambda: TopPLogitsWarper(float(rollout.top_p))
    zeros_RT, ones_RT = torch.zeros(2, 2), torch.ones(2, 2)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    name = actor.policy_loss.loss_mode
    if verls_own([name], core_algos.POLICY_LOSS_REGISTRY):
        loss = core_algos.get_policy_loss_fn(name)
        rows = (zeros_RT, zeros_RT, ones_RT, ones_RT)
        yield f"{LOSS_MODE}={name}", partial(loss, *rows, actor.loss_agg_mode, actor)
    settings = config.algorithm.get("rollout_correction") or {}
    given = {key: value for key, value in settings.items() if key.startswith("rollout_")}
    correct = partial(compute_rollout_correction_and_rejection_mask, **given)
    yield "algorithm.rollout_correction", partial(correct, zeros_RT, zeros_RT, ones_RT)
