"""Idle rows of a batch: those that add nothing to the actor's gradient, by their rewards, before any pass."""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto

from verl_padding.driver.advantages import (
    MASK,
    READ,
    REWARDS,
    SCORES,
    advantages_of_sessions,
    advantages_of_untrained_ends,
)
from verl_padding.pads.queue import KVBatchMeta, read_fields
from verl_padding.plan.row_keys import uid_of_key


def find_idle_rows(batch: KVBatchMeta, config: DictConfig, *, by_session: bool, images: bool) -> list[int]:
    """Numbers of the rows without a trained token, or with an advantage of exactly 0 on each.

    Those with a trained token come first, the shortest first: an update of such rows alone computes the first. It is a
    guess: what a pass computes may change advantages, as a rejection does, and the update looks at them again.
    """
    rows = read_fields(batch.keys, batch.partition_id, READ)
    advantages = advantages_by_scores(batch, rows, config, by_session=by_session, images=images)
    masks = rows[MASK].unbind()
    idle = [row for row, advantage in enumerate(advantages) if not (advantage * masks[row]).any()]
    return sorted(idle, key=lambda row: (not masks[row].any(), batch.tags[row]["seq_len"], row))


def advantages_by_scores(
    batch: KVBatchMeta, rows: TensorDict, config: DictConfig, *, by_session: bool, images: bool
) -> Sequence[torch.Tensor]:
    """The advantages (response tokens,) that each row will have, as far as scores and masks alone decide them.

    What verl's trainer does with them in ``_compute_advantage``, and the padded one after it.

    Args:
        rows: their masks and scores, jagged.
    """
    if by_session:
        return advantages_of_sessions(batch, rows, config.algorithm, images=images)["advantages"].unbind()
    return row_advantages(rows, batch.keys, config.algorithm, sessions_per_prompt=config.actor_rollout_ref.rollout.n)


def row_advantages(
    rows: TensorDict, keys: Sequence[str], algorithm: DictConfig, *, sessions_per_prompt: int
) -> Sequence[torch.Tensor]:
    """The same where each row is a sample, (response tokens,) each: verl's own function, and the padded trainer's
    repair of sessions whose last row is not trained."""
    # Not at the top: importing verl's v1 trainers imports the padded ones, and these import this module.
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    lengths, padded = rows[MASK].offsets().diff().tolist(), rows.to_padded_tensor()
    columns = {MASK: padded[MASK], REWARDS: padded[SCORES], "token_level_scores": padded[SCORES]}
    uids = np.array([uid_of_key(key) for key in keys], dtype=object)
    data = compute_advantage_for_multi_trajectories(
        DataProto.from_dict(tensors=columns, non_tensors={"uid": uids}),
        batch_keys=keys,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=sessions_per_prompt,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    advantages = [row[:length] for row, length in zip(data.batch["advantages"], lengths, strict=True)]
    for row, repaired in advantages_of_untrained_ends(rows, keys, algorithm).items():
        advantages[row] = repaired
    return advantages
