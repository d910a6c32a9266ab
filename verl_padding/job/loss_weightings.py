"""How the losses of a job weigh rows, and what they cannot weigh."""

from omegaconf import DictConfig, OmegaConf

from verl_padding.config import PaddingConfig
from verl_padding.errors import Incompatibility, PaddingConfigError, refuse
from verl_padding.job.role_engine import ACTOR_SECTION, has_critic
from verl_padding.job.verl_losses import BYPASS, LOSS_MODE, MEANS_OVER_ROWS, NOT_SUMS
from verl_padding.pads.loss_weighting import MEAN_OF_TOKENS, TOKEN_MODES, LossWeighting

CORRECTION = f"{LOSS_MODE.removesuffix('.loss_mode')}.rollout_correction"
"""The section that :data:`BYPASS` reads, which no YAML of verl has."""


def loss_weighting(config: DictConfig, padding: PaddingConfig) -> LossWeighting:
    """How the actor's loss weighs its rows; rows of another update all weigh the same."""
    mode, by_session = config.actor_rollout_ref.actor.loss_agg_mode, padding.weighting == "session"
    return LossWeighting(
        mode=mode,
        divides_by_rows=padding.denominator == "rows",
        by_session=by_session,
        refusal=_refusal_of_policy_loss(config, mode, by_session),
    )


def check_losses(config: DictConfig, padding: PaddingConfig) -> None:
    """Refuses sessions that are to weigh the same where no loss can weigh them, and a mean over
    sequences that divides by the width to which verl pads them."""
    weighting = loss_weighting(config, padding)
    if weighting.by_session and weighting.refusal:
        why = f"no loss of this job can weigh sessions: {weighting.refusal}"
        raise PaddingConfigError(f"padding.weighting='session': {why}")
    losses = {ACTOR_SECTION: config.actor_rollout_ref.actor}
    if has_critic(config):
        losses["critic"] = config.critic
    for section, loss in losses.items():
        if loss.loss_agg_mode == "seq-mean-token-sum-norm" and loss.loss_scale_factor is None:
            refuse(
                f"{section}.loss_scale_factor=None",
                f"loss_agg_mode={loss.loss_agg_mode} divides by the padded width",
                "Set it to a constant, such as data.max_response_length.",
            )


def packing_incompatibility(config: DictConfig) -> Incompatibility | None:
    """Why the actor's loss is another one where other rows are in a micro-batch; None if it is not.

    verl's own packer decides it then, as in stock verl.
    """
    loss = OmegaConf.select(config, LOSS_MODE)
    normalize = f"{CORRECTION}.rollout_is_batch_normalize"
    if loss in NOT_SUMS:
        why = "it selects tokens across a micro-batch"
        return Incompatibility(f"{LOSS_MODE}={loss}", why, "Choose another loss.")
    if loss == BYPASS and OmegaConf.select(config, normalize):
        why = "it divides by the mean over the rows of a micro-batch"
        return Incompatibility(f"+{normalize}=True", why, "Set it to False.")
    return None


def _refusal_of_policy_loss(config: DictConfig, mode: str, by_session: bool) -> str:
    """Why the actor's rows cannot weigh differently; empty if they can."""
    loss = OmegaConf.select(config, LOSS_MODE)
    # The pieces of a session that weighs as one row add up: to a sum over its tokens in these
    # modes, to none of rows.
    is_sum_of_tokens = mode in TOKEN_MODES or (by_session and mode != MEAN_OF_TOKENS)
    if incompatibility := packing_incompatibility(config):
        why = str(incompatibility).removesuffix(".")
    elif loss in MEANS_OVER_ROWS and is_sum_of_tokens:
        why = (
            f"{LOSS_MODE}={loss} is a mean over rows, and {ACTOR_SECTION}.loss_agg_mode={mode} one "
            f"over tokens. Choose {MEAN_OF_TOKENS}"
        )
    else:
        return ""
    return f"{why}, or let all rows weigh the same."
