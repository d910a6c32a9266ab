"""Groups of sessions in verl's replay buffer, whose filter of groups compares rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_padding.plan.row_keys import rows_of_sessions


def count_sessions(buffer: Any) -> Any:
    """The same buffer; verl's own filters groups by their sessions, a user's is left as it is.

    verl filters a prompt out if its rows, at least two, all have one reward. A session of two rows would be such a
    group by itself, and more copies of a reward change whether NumPy finds a standard deviation of exactly 0. So the
    filter sees the last row of each session alone.
    """
    own = getattr(type(buffer), "_dapo_filtered_keys", None)
    if own is not ReplayBuffer._dapo_filtered_keys or buffer.filter_groups_metric is None:
        return buffer
    filter_rows = buffer._dapo_filtered_keys

    def filter_sessions(partition_id: str) -> tuple[set[str], Counter[float]]:
        rows = buffer.partitions[partition_id]
        keys = list(rows)
        last_S = [keys[of_session[-1]] for of_session in rows_of_sessions(keys)]
        buffer.partitions[partition_id] = {key: rows[key] for key in last_S}
        try:
            return filter_rows(partition_id)
        finally:
            buffer.partitions[partition_id] = rows

    buffer._dapo_filtered_keys = filter_sessions
    return buffer
