"""How many sessions a step was configured for, and what became of those that brought no row.

verl's agent loop marks a prompt ``failure`` if one of its sessions has raised an error, else
``finished``, and its replay buffer takes the prompts of a batch out of TransferQueue as it gives
their rows to the trainer. The asynchronous modes give no row of a prompt that failed: they replace
it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl_padding.job import metric_names as names
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key

TRAIN = "train"
"""verl's name for the rows that are trained on."""


class SessionCounts:
    """Counts the sessions of the prompts that a replay buffer has given for a step's batches.

    Args:
        sessions: of a prompt (``rollout.n``).
    """

    def __init__(self, sessions: int):
        self._sessions = sessions
        self._has_failed: dict[str, bool] = {}  # by the uids of the prompts

    def watch(self, buffer: Any) -> Any:
        """The same replay buffer, which notes the prompts that it gives; left as it is if it has a
        way of its own."""
        # Not at the top: importing verl's v1 trainers imports the padded ones, and these import
        # this module.
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

        if getattr(type(buffer), "_materialize_batch", None) is not ReplayBuffer._materialize_batch:
            return buffer
        materialize = buffer._materialize_batch

        # By verl's names: a sampler of the user's own may call it by them.
        def noting(
            partition_id: str, selected_prompt_uids: Sequence[str], partition_snapshot: Any
        ) -> Any:
            if partition_id == TRAIN:
                failed = buffer.failure_keys[partition_id]
                self._has_failed |= {uid: uid in failed for uid in selected_prompt_uids}
            return materialize(partition_id, selected_prompt_uids, partition_snapshot)

        buffer._materialize_batch = noting
        return buffer

    def start_step(self) -> None:
        """Forgets the prompts of the step before."""
        self._has_failed.clear()

    def metrics(self, keys: Sequence[str]) -> dict[str, float]:
        """Metrics of the step's batches, whose rows have these keys.

        Arrived sessions alone if no prompt was noted, or one has more of them than it was
        configured to have.
        """
        arrived_of = Counter(uid_of_key(keys[session[0]]) for session in rows_of_sessions(keys))
        arrived = sum(arrived_of.values())
        metrics: dict[str, float] = {names.SESSIONS_ARRIVED: arrived}
        if self._has_failed and max(arrived_of.values()) <= self._sessions:
            configured = self._sessions * len(self._has_failed)
            failed = sum(
                self._sessions - arrived_of[uid]
                for uid, has_failed in self._has_failed.items()
                if has_failed
            )
            metrics |= {
                names.SESSIONS_CONFIGURED: configured,
                names.SESSIONS_MISSING: configured - arrived,
                names.SESSIONS_FAILED: failed,
                names.SESSIONS_EMPTY: configured - arrived - failed,
            }
        return metrics
