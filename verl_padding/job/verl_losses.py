"""What the plug-in has to know of verl's policy losses and advantage estimators: a line for
each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.job.incompatibility import refuse

LOSS_MODE, ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"
BYPASS = "bypass_mode"
"""The policy loss that corrects for the rollout by itself."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Properties of a policy loss of verl, which ``tests/equivalence`` computes; none reads more of
    the pass before the update than old log-probs."""

    is_zero_without_advantage: bool = True
    """Whether it is a sum of terms which the advantage multiplies: a row without one has no
    gradient."""
    is_sum: bool = True
    """Whether it is a sum over rows or tokens, so that rows can weigh differently; not if it
    chooses tokens among those of all rows of a micro-batch."""
    is_mean_over_rows: bool = False
    """Whether it is a mean over rows, whatever ``loss_agg_mode`` says of the other terms."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Properties of an advantage estimator of verl."""

    reads_old_log_probs: bool = False
    has_groups: bool = True
    """Whether it compares the sessions of a prompt."""
    whitens: bool = False
    """Whether it divides by a variance over all trained tokens, of which it raises on a single
    one."""
    needs_two_samples: bool = False
    """Whether it raises on a prompt with a single sample."""


POLICY_LOSSES = {
    "vanilla": PolicyLoss(),
    "dppo_tv": PolicyLoss(),
    "dppo_kl": PolicyLoss(),
    "gspo": PolicyLoss(),
    "sapo": PolicyLoss(is_mean_over_rows=True),
    "gpg": PolicyLoss(),
    "clip_cov": PolicyLoss(is_zero_without_advantage=False, is_sum=False),
    "kl_cov": PolicyLoss(is_zero_without_advantage=False, is_sum=False),
    "geo_mean": PolicyLoss(is_mean_over_rows=True),
    "cispo": PolicyLoss(),
    "dro": PolicyLoss(is_zero_without_advantage=False),
    BYPASS: PolicyLoss(),
}
ESTIMATORS = {
    "gae": Estimator(has_groups=False, whitens=True),
    "grpo": Estimator(),
    "grpo_vectorized": Estimator(),
    "grpo_passk": Estimator(needs_two_samples=True),
    "reinforce_plus_plus": Estimator(has_groups=False, whitens=True),
    "reinforce_plus_plus_baseline": Estimator(whitens=True),
    "remax": Estimator(has_groups=False),
    "rloo": Estimator(),
    "rloo_vectorized": Estimator(),
    "opo": Estimator(),
    "gpg": Estimator(),
    "gdpo": Estimator(),
    "optimal_token_baseline": Estimator(reads_old_log_probs=True),
    "tir_optimal_token_baseline": Estimator(reads_old_log_probs=True),
}


def losses_that(has: Callable[[PolicyLoss], bool]) -> list[str]:
    """Names of the policy losses with a property.

    >>> losses_that(lambda loss: not loss.is_sum)
    ['clip_cov', 'kl_cov']
    """
    return [name for name, loss in POLICY_LOSSES.items() if has(loss)]


def verls_own(names: list[str], registry: Mapping[Any, Callable[..., Any]]) -> list[str]:
    """Those of some names that still have verl's own function, not one that a user has registered
    in its place."""
    functions = {str(name): function for name, function in registry.items()}
    return [
        name
        for name in names
        if name in functions and functions[name].__module__.startswith("verl.")
    ]


def check_names(config: DictConfig) -> None:
    """Refuses a loss or an estimator of verl's that is not known here: it would be taken for a sum
    over tokens, or for one that compares sessions."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for setting, known, registry in (
        (LOSS_MODE, POLICY_LOSSES, POLICY_LOSS_REGISTRY),
        (ESTIMATOR, ESTIMATORS, ADV_ESTIMATOR_REGISTRY),
    ):
        name = OmegaConf.select(config, setting)
        if name not in known and verls_own([name], registry):
            why = "verl has it, but this version of the plug-in does not know what it reads"
            refuse(f"{setting}={name}", why, "Choose another one.")
