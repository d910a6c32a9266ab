"""Rows that add nothing to the actor's gradient."""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto

from verl_padding.driver.advantages import MASK, REWARDS, SCORES, advantages_of_untrained_ends
from verl_padding.pads.queue import KVBatchMeta, read_fields
from verl_padding.plan.row_keys import uid_of_key


def find_zero_advantage_rows(batch: KVBatchMeta) -> list[int]:
    """Numbers of the rows without a trained token, or with an advantage of exactly 0 on each.

    Those with a trained token come first, the shortest first: an update of such rows alone computes the first.
    """
    rows = read_fields(batch.keys, batch.partition_id, ("advantages", MASK))
    mask_R = rows[MASK].unbind()
    pairs = enumerate(zip(rows["advantages"].unbind(), mask_R, strict=True))
    found = [row for row, (advantage, mask) in pairs if not (advantage * mask).any()]
    return sorted(found, key=lambda row: (not mask_R[row].any(), batch.tags[row]["seq_len"], row))


def row_advantages(
    rows: TensorDict, keys: Sequence[str], algorithm: DictConfig, *, sessions_per_prompt: int
) -> Sequence[torch.Tensor]:
    """The advantages, (response tokens,) each, that rows will have as samples of their own, as far as scores and masks
    alone decide them: by verl's own function, and the padded trainer's for sessions whose last row is not trained.

    Args:
        rows: their masks and scores, jagged.
    """
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
    for row, fixed in advantages_of_untrained_ends(rows, keys, algorithm).items():
        advantages[row] = fixed
    return advantages
