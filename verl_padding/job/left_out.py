"""What a job may leave out of its computation without a change of its updates, and what forbids it.

Idle rows have no trained token, or an advantage of exactly 0 on each. A policy loss that is a sum
of terms which the advantage multiplies has no gradient in them; whatever else the actor's loss adds
up has one. Old log-probs are those of an update's first optimizer step: a batch of one step needs
the pass that computes them for their other readers only.
"""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from verl_padding.config import PaddingConfig
from verl_padding.job.loss_weightings import CORRECTION, LOSS_MODE
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import ACTOR_SECTION
from verl_padding.job.verl_losses import ESTIMATORS, losses_that, of_verl
from verl_padding.plan import STRATEGIES

LEFT_OUT = {"zero_advantage_rows": "skip", "recompute_old_log_probs": False}
"""Setting -> the value with which something is left out."""
ESTIMATOR = "algorithm.adv_estimator"
ROLLOUT_CORRECTION = "algorithm.rollout_correction"


def needed_by(
    config: DictConfig, padding: PaddingConfig, *, steps: int, local_updates: int
) -> dict[str, str]:
    """Of each setting of :data:`LEFT_OUT`: what needs the work that it leaves out, and the fix;
    empty if nothing does.

    Args:
        steps: optimizer steps of an epoch over a batch.
        local_updates: of a global step, all of which compare with the policy of its beginning.
    """
    return {
        "zero_advantage_rows": why_zero_advantage_rows_count(config),
        "recompute_old_log_probs": why_pass_is_needed(
            config, padding.strategy, steps=steps, local_updates=local_updates
        ),
    }


def why_zero_advantage_rows_count(config: DictConfig) -> str:
    """What idle rows would add to an actor's update, and the fix; empty if that is nothing."""
    actor, admitted = ACTOR_SECTION, losses_that(lambda loss: loss.is_zero_without_advantage)
    return (
        _unless_one_of(
            config,
            LOSS_MODE,
            _verls_losses(admitted),
            "it is not known to be 0 where the advantage is",
        )
        or _if_set(
            config,
            f"{CORRECTION}.rollout_is_batch_normalize",
            "it divides by a mean over a micro-batch's rows",
        )
        or _if_set(config, f"{actor}.use_kl_loss", "the KL loss has a gradient in every row")
        or _if_set(config, f"{actor}.entropy_coeff", "the entropy has a gradient in every row")
        or _if_set(
            config, f"{actor}.calculate_entropy", "the metric actor/entropy_loss is of all rows"
        )
        or _if_set(config, "distillation.enabled", "the teacher's loss has a gradient in every row")
    )


def why_pass_is_needed(config: DictConfig, strategy: str, *, steps: int, local_updates: int) -> str:
    """Who reads old log-probs beside the loss of the first optimizer step, and the fix; empty if
    nobody does.

    ``tests/job/test_left_out.py`` lists all that reads them in verl.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if not STRATEGIES[strategy].has_fixed_steps:
        fixed = " or ".join(name for name, each in STRATEGIES.items() if each.has_fixed_steps)
        return (
            f"padding.strategy={strategy}: a batch takes as many optimizer steps as its rows fill."
            f" Choose {fixed}."
        )
    if steps > 1:
        setting = f"{ACTOR_SECTION}.ppo_mini_batch_size"
        size = OmegaConf.select(config, setting)
        return (
            f"{setting}={size}: the second of {steps} optimizer steps compares with them. Set it to"
            f" {size * steps}."
        )
    if (epochs := OmegaConf.select(config, f"{ACTOR_SECTION}.ppo_epochs")) > 1:
        return (
            f"{ACTOR_SECTION}.ppo_epochs={epochs}: the second epoch compares with them. Set it"
            " to 1."
        )
    if local_updates > 1:
        setting = f"trainer.v1.{SEPARATE_ASYNC}.parameter_sync_step"
        return (
            f"{setting}={local_updates}: the second local update compares with them. Set it to 1."
        )
    replay = f"{ACTOR_SECTION}.{config.actor_rollout_ref.actor.strategy}.router_replay.mode"
    if OmegaConf.select(config, replay) == "R2":
        return (
            f"{replay}=R2: the pass records the routes that the update replays. Set it to R3 or"
            " disabled."
        )
    losses = _verls_losses(losses_that(lambda loss: loss.reads_old_log_probs_alone))
    estimators = [name for name, each in ESTIMATORS.items() if not each.reads_old_log_probs]
    rollout = "actor_rollout_ref.rollout.calculate_log_probs"
    return (
        _if_set(
            config, f"{ROLLOUT_CORRECTION}.bypass_mode", "there is no pass that could be left out"
        )
        or _if_set(
            config, f"{ROLLOUT_CORRECTION}.rollout_is", "it compares those of the rollout with them"
        )
        or _if_set(
            config, f"{ROLLOUT_CORRECTION}.rollout_rs", "it compares those of the rollout with them"
        )
        or _if_set(config, rollout, "metrics compare those of the rollout with them")
        or _if_set(config, "algorithm.use_kl_in_reward", "rewards depend on them")
        or _if_set(config, "distillation.enabled", "the teacher's loss may read them")
        or _unless_one_of(config, LOSS_MODE, losses, "it may read more of the pass")
        or _unless_one_of(
            config,
            ESTIMATOR,
            of_verl(estimators, ADV_ESTIMATOR_REGISTRY),
            "it reads them, or may do so",
        )
    )


def _if_set(config: DictConfig, setting: str, why: str) -> str:
    value = OmegaConf.select(config, setting)
    fix = "False" if value is True else "0" if isinstance(value, float) else "null"
    return f"{setting}={value}: {why}. Set it to {fix}." if value else ""


def _unless_one_of(config: DictConfig, setting: str, admitted: Sequence[str], why: str) -> str:
    value = OmegaConf.select(config, setting)
    return (
        ""
        if value in admitted
        else f"{setting}={value}: {why}. Choose one of {', '.join(admitted)}."
    )


def _verls_losses(names: list[str]) -> list[str]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return of_verl(names, POLICY_LOSS_REGISTRY)
