"""How the losses of a job weigh rows, and what they cannot weigh."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.calls import ACTOR, CRITIC
from verl_padding.job.roles_of_job import has_critic
from verl_padding.pads.weighing import MEAN_OF_TOKENS, TOKEN_MODES, Weighing

MEANS_OVER_ROWS = ("geo_mean", "sapo")
"""Policy losses of verl that are a mean over rows, whatever ``loss_agg_mode`` says of the other terms."""
NO_SUMS = ("clip_cov", "kl_cov")
"""Policy losses of verl that choose tokens among all of a micro-batch, and so are no sum over rows or tokens."""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
BYPASS, BATCH_NORMALIZE = (
    "bypass_mode",
    "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_batch_normalize",
)
"""The policy loss that corrects for the rollout by itself, and the setting that it reads, which no YAML of verl has."""


def weighings(config: DictConfig, padding: PaddingConfig) -> list[Weighing]:
    """Loss weighting of each update whose rows may weigh differently."""
    losses = {ACTOR: config.actor_rollout_ref.actor}
    if padding.weighted_losses == "all" and has_critic(config):
        losses[CRITIC] = config.critic
    by_session = padding.weighting == "session"
    return [
        Weighing(
            call=call,
            mode=loss.loss_agg_mode,
            by_rows=padding.denominator == "rows",
            by_session=by_session,
            refusal=_refusal_of_policy_loss(config, loss.loss_agg_mode, by_session) if call == ACTOR else "",
        )
        for call, loss in losses.items()
    ]


def refuse_equal_sessions(config: DictConfig, padding: PaddingConfig) -> None:
    """
    Raises:
        PaddingConfigError: sessions are to weigh the same in a loss that cannot weigh rows.
    """
    for weighing in weighings(config, padding):
        if weighing.by_session and (refusal := weighing.refusal):
            raise PaddingConfigError(f"padding.weighting='session': no loss of this job can weigh sessions: {refusal}")


def _refusal_of_policy_loss(config: DictConfig, mode: str, by_session: bool) -> str:
    """Why the actor's rows cannot weigh differently; empty if they can."""
    loss = OmegaConf.select(config, LOSS_MODE)
    if loss in NO_SUMS:
        return (
            f"{LOSS_MODE}={loss} chooses tokens among all of a micro-batch, and is no sum over rows or tokens. Choose "
            "another loss, or let all rows weigh the same."
        )
    # The pieces of a session that weighs as one row add up: to a sum over its tokens in these modes, to none of rows.
    if loss in MEANS_OVER_ROWS and (mode in TOKEN_MODES or (by_session and mode != MEAN_OF_TOKENS)):
        return (
            f"{LOSS_MODE}={loss} is a mean over rows, but with actor_rollout_ref.actor.loss_agg_mode={mode} the other "
            f"terms are sums over tokens: they have no denominator in common. Choose {MEAN_OF_TOKENS}, or let all rows "
            "weigh the same."
        )
    if loss == BYPASS and OmegaConf.select(config, BATCH_NORMALIZE.lstrip("+"), default=False):
        return (
            f"{BATCH_NORMALIZE}=True divides by the mean over the rows of a micro-batch, however these weigh. Set it "
            "to False, or let all rows weigh the same."
        )
    return ""
