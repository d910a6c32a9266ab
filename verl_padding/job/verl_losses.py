"""What the plug-in has to know of verl's policy losses and advantage estimators: all names, and
which have a property that tests compute."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import refuse

LOSS_MODE, ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"
BYPASS = "bypass_mode"
"""The policy loss that corrects for the rollout by itself."""

NOT_SUMS = ("clip_cov", "kl_cov")
"""Losses that choose tokens among those of all rows of a micro-batch, so that rows cannot weigh
differently. The others are sums over rows or tokens."""
MEANS_OVER_ROWS = ("sapo", "geo_mean")
"""Losses that are means over rows, whatever ``loss_agg_mode`` says of the other terms."""
ZERO_WITHOUT_ADVANTAGE = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "gpg",
    "cispo",
    BYPASS,
    *MEANS_OVER_ROWS,
)
"""Losses that are sums of terms which the advantage multiplies: a row without one has no
gradient."""
POLICY_LOSSES = (*ZERO_WITHOUT_ADVANTAGE, *NOT_SUMS, "dro")
"""None reads more of the pass before the update than old log-probs."""

WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
"""Estimators that do not compare the sessions of a prompt."""
WHITENING = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that divide by a variance over all trained tokens, of which they raise on a single
one."""
OF_TWO_SAMPLES = ("grpo_passk",)
"""Estimators that raise on a prompt with a single sample."""
READING_OLD_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")
GROUPING = (
    "grpo",
    "grpo_vectorized",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    *OF_TWO_SAMPLES,
    *READING_OLD_LOG_PROBS,
)
"""Estimators that compare the sessions of a prompt."""
ESTIMATORS = (*WITHOUT_GROUPS, *GROUPING)
"""All that are known; of a loss or an estimator that a user registers, nothing of this is."""


def verls_own(names: Iterable[str], registry: Mapping[Any, Callable[..., Any]]) -> list[str]:
    """Those of some names that still have verl's own function, not one that a user has registered
    in its place."""
    own = {str(name) for name, each in registry.items() if each.__module__.startswith("verl.")}
    return [name for name in names if name in own]


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
