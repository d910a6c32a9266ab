"""Idle rows of a batch: those that add nothing to the actor's gradient, by their rewards, before any pass."""

from omegaconf import DictConfig

from verl_padding.driver.advantages import advantages_by_scores
from verl_padding.pads.queue import KVBatchMeta, read_fields


def find_idle_rows(batch: KVBatchMeta, config: DictConfig, *, by_session: bool, images: bool) -> list[int]:
    """Numbers of the rows without a trained token, or with an advantage of exactly 0 on each.

    Those with a trained token come first, the shortest first: an update of such rows alone computes the first. It is a
    guess: what a pass computes may change advantages, as a rejection does, and the update looks at them again.
    """
    masks = read_fields(batch.keys, batch.partition_id, ["response_mask"])["response_mask"].unbind()
    advantages = advantages_by_scores(batch, config, by_session=by_session, images=images)
    idle = [row for row, advantage in enumerate(advantages) if not (advantage * masks[row]).any()]
    return sorted(idle, key=lambda row: (not masks[row].any(), batch.tags[row]["seq_len"], row))
