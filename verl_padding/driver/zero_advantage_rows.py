"""Rows that add nothing to the actor's gradient."""

from verl_padding.driver.advantages import MASK
from verl_padding.pads.queue import KVBatchMeta, read_fields


def find_zero_advantage_rows(batch: KVBatchMeta) -> list[int]:
    """Numbers of the rows without a trained token, or with an advantage of exactly 0 on each.

    Those with a trained token come first, the shortest first: an update of such rows alone computes
    the first.
    """
    rows = read_fields(batch.keys, batch.partition_id, ("advantages", MASK))
    mask_R = rows[MASK].unbind()
    pairs = enumerate(zip(rows["advantages"].unbind(), mask_R, strict=True))
    found = [row for row, (advantage, mask) in pairs if not (advantage * mask).any()]
    return sorted(found, key=lambda row: (not mask_R[row].any(), batch.tags[row]["seq_len"], row))
