"""verl's filter of groups (DAPO) compares sessions, and those of a role where roles have baselines.

verl leaves a prompt out if its rows, at least two, all have one reward. A session of two rows would
be such a group by itself, and more copies of a reward change whether NumPy finds a standard
deviation of exactly 0.
"""

from collections import Counter, defaultdict
from copy import copy
from typing import Any

from verl_padding.driver.agent_roles import read_roles
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key


def filter_groups_by_sessions(buffer: Any, *, by_role: bool) -> Any:
    """The same replay buffer, whose filter sees the last row of each session; a user's filter is
    left as it is.

    Args:
        by_role: whether it is asked for each role, with the rows of that role alone. A prompt is
            left out if each of its roles would leave it out.
    """
    # Not at the top: importing verl's v1 trainers imports the padded ones, and these import this
    # module.
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    filter_rows: Any = ReplayBuffer._dapo_filtered_keys
    own: Any = getattr(type(buffer), "_dapo_filtered_keys", None)
    if own is not filter_rows or buffer.filter_groups_metric is None:
        return buffer
    views: dict[str, Any] = {}  # the buffer as each role sees it, with what verl remembers of that

    def filter_sessions(partition_id: str) -> tuple[set[str], Counter[float]]:
        rows, finished = buffer.partitions[partition_id], buffer.finished_keys[partition_id]
        keys = [key for key in rows if uid_of_key(key) in finished]
        role_R = read_roles(keys, partition_id) if by_role else [""] * len(keys)
        # A prompt without a row is in no role; verl refuses it.
        empty = finished - set(map(uid_of_key, keys))
        kept: set[str] = set()
        reward_of: dict[str, float] = {}
        for role in dict.fromkeys(role_R) or [""]:
            if role not in views:
                views[role] = copy(buffer)
                views[role]._dapo_classification_cache = defaultdict(dict)
            # Two rows of session 0 and one of session 1 are two votes: verl sees the last of each.
            view = views[role]
            with_role = [key for key, own in zip(keys, role_R, strict=True) if own == role]
            last_S = [with_role[session[-1]] for session in rows_of_sessions(with_role)]
            uids = set(map(uid_of_key, last_S))
            view.partitions = {partition_id: {key: rows[key] for key in last_S}}
            view.finished_keys = {partition_id: uids | empty}
            filtered, _ = filter_rows(view, partition_id)
            rewards = view._dapo_classification_cache[partition_id]
            reward_of |= {uid: rewards[uid] for uid in filtered}
            kept |= uids - filtered
        dropped = reward_of.keys() - kept
        return dropped, Counter(reward_of[uid] for uid in dropped)

    buffer._dapo_filtered_keys = filter_sessions
    return buffer
