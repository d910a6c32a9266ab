"""What a job may leave out of its computation without a change of its updates, and what forbids it.

Zero-advantage rows have no trained token, or an advantage of exactly 0 on each. A policy loss that
is a sum of terms which the advantage multiplies has no gradient in them; whatever else the actor's
loss adds up has one. Old log-probs are those of an update's first optimizer step: a batch of one
step needs the pass that computes them for their other readers only.
"""

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import Incompatibility
from verl_padding.job.calls import ACTOR
from verl_padding.job.loss_weightings import CORRECTION
from verl_padding.job.modes import SEPARATE_ASYNC
from verl_padding.job.role_engine import ACTOR_SECTION
from verl_padding.job.verl_losses import (
    ESTIMATOR,
    ESTIMATORS,
    LOSS_MODE,
    POLICY_LOSSES,
    READING_OLD_LOG_PROBS,
    ZERO_WITHOUT_ADVANTAGE,
    verls_own,
)
from verl_padding.plan import STRATEGIES, Job

ROLLOUT_CORRECTION = "algorithm.rollout_correction"


def zero_advantage_incompatibilities(config: DictConfig) -> Iterator[Incompatibility]:
    """What zero-advantage rows would add to an actor's update."""
    actor = ACTOR_SECTION
    why = "its gradient may not be 0 for an advantage of 0"
    yield from _unless_one_of(config, LOSS_MODE, ZERO_WITHOUT_ADVANTAGE, why)
    for_all = (
        f"{CORRECTION}.rollout_is_batch_normalize",
        f"{actor}.use_kl_loss",
        f"{actor}.entropy_coeff",
        f"{actor}.calculate_entropy",
        "distillation.enabled",
    )
    yield from _if_set(config, for_all, "zero-advantage rows add to it")


def old_log_prob_incompatibilities(
    config: DictConfig, job: Job, *, local_updates: int
) -> Iterator[Incompatibility]:
    """Who reads old log-probs beside the loss of the first optimizer step.

    ``tests/job/test_saving_rules.py`` lists all that reads them in verl.

    Args:
        job: what is planned of a local update.
        local_updates: of a global step, all of which compare with the policy of its beginning.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    # Steps by rows are one until a batch has more (driver/planned_update.py).
    steps = job.configured_steps(job.updates[ACTOR])
    if STRATEGIES[job.strategy].has_own_steps:
        why = "a batch takes as many optimizer steps as its rows fill"
        others = " or ".join(name for name, each in STRATEGIES.items() if not each.has_own_steps)
        yield Incompatibility(f"padding.strategy={job.strategy}", why, f"Choose {others}.")
    actor = config.actor_rollout_ref.actor
    if steps > 1:
        setting = f"{ACTOR_SECTION}.ppo_mini_batch_size={actor.ppo_mini_batch_size}"
        why = f"the second of {steps} optimizer steps needs old log-probs"
        yield Incompatibility(setting, why, f"Set it to {job.prompts}.")
    # From the second optimizer step on, the policy is not the one that the pass was of.
    if (epochs := actor.ppo_epochs) > 1:
        why = "the second epoch needs old log-probs"
        yield Incompatibility(f"{ACTOR_SECTION}.ppo_epochs={epochs}", why, "Set it to 1.")
    if local_updates > 1:
        setting = f"trainer.v1.{SEPARATE_ASYNC}.parameter_sync_step={local_updates}"
        why = "the second local update needs old log-probs"
        yield Incompatibility(setting, why, "Set it to 1.")
    replay = f"{ACTOR_SECTION}.{actor.strategy}.router_replay.mode"
    if OmegaConf.select(config, replay) == "R2":
        why = "the pass records the routes that the update replays"
        yield Incompatibility(f"{replay}=R2", why, "Set it to R3 or disabled.")
    readers = (
        f"{ROLLOUT_CORRECTION}.bypass_mode",
        f"{ROLLOUT_CORRECTION}.rollout_is",
        f"{ROLLOUT_CORRECTION}.rollout_rs",
        "actor_rollout_ref.rollout.calculate_log_probs",
        "algorithm.use_kl_in_reward",
        "distillation.enabled",
    )
    yield from _if_set(config, readers, "it reads old log-probs, or replaces them")
    # The workers see whether a loss of one of these names is verl's (worker/worker_check.py).
    why = "it may read other results of the pass"
    yield from _unless_one_of(config, LOSS_MODE, POLICY_LOSSES, why)
    estimators = [name for name in ESTIMATORS if name not in READING_OLD_LOG_PROBS]
    known = verls_own(estimators, ADV_ESTIMATOR_REGISTRY)
    yield from _unless_one_of(config, ESTIMATOR, known, "it reads old log-probs, or may")


def _if_set(config: DictConfig, settings: Sequence[str], why: str) -> Iterator[Incompatibility]:
    for setting in settings:
        if value := OmegaConf.select(config, setting):
            number = 0 if isinstance(value, int | float) else "null"
            fix = False if isinstance(value, bool) else number
            yield Incompatibility(f"{setting}={value}", why, f"Set it to {fix}.")


def _unless_one_of(
    config: DictConfig, setting: str, admitted: Sequence[str], why: str
) -> Iterator[Incompatibility]:
    value = OmegaConf.select(config, setting)
    if value not in admitted:
        yield Incompatibility(f"{setting}={value}", why, f"Choose one of {', '.join(admitted)}.")
