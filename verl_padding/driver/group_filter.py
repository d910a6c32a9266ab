"""verl's filter of groups (DAPO) compares sessions.

verl leaves a prompt out if its rows, at least two, all have one reward. A session of two rows would
be such a group by itself, and more copies of a reward change whether NumPy finds a standard
deviation of exactly 0.
"""

from collections import Counter, defaultdict
from copy import copy
from typing import Any

from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key


def filter_groups_by_sessions(buffer: Any) -> Any:
    """The same replay buffer, whose filter sees the last row of each session; a user's filter is
    left as it is."""
    # Not at the top: importing verl's v1 trainers imports the padded ones, and these import this
    # module.
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    filter_rows: Any = ReplayBuffer._dapo_filtered_keys
    own: Any = getattr(type(buffer), "_dapo_filtered_keys", None)
    if own is not filter_rows or buffer.filter_groups_metric is None:
        return buffer
    view = copy(buffer)  # with what verl remembers of sessions
    view._dapo_classification_cache = defaultdict(dict)

    def filter_sessions(partition_id: str) -> tuple[set[str], Counter[float]]:
        # Two rows of session 0 and one of session 1 are two votes: verl sees the last of each.
        rows, finished = buffer.partitions[partition_id], buffer.finished_keys[partition_id]
        keys = [key for key in rows if uid_of_key(key) in finished]
        last_S = [keys[session[-1]] for session in rows_of_sessions(keys)]
        view.partitions = {partition_id: {key: rows[key] for key in last_S}}
        view.finished_keys = {partition_id: finished}
        filtered: tuple[set[str], Counter[float]] = filter_rows(view, partition_id)
        return filtered

    buffer._dapo_filtered_keys = filter_sessions
    return buffer
