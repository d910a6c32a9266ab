"""How many sessions a step was configured for, and what became of those that brought no row.

verl's agent loop marks a prompt ``failure`` if one of its sessions has raised an error, else ``finished``, and its
replay buffer takes the prompts of a batch out of TransferQueue as it gives their rows to the trainer. The asynchronous
modes give no row of a prompt that failed: they replace it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl_padding.job import metric_names as names
from verl_padding.plan.row_keys import session_of_key, uid_of_key

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
        """The same replay buffer, which notes the prompts that it gives; a user's, if it does that as verl's."""
        materialize = getattr(buffer, "_materialize_batch", None)
        if materialize is None:
            return buffer

        def noting(partition_id: str, uids: Sequence[str], *args: Any, **kwargs: Any) -> Any:
            if partition_id == TRAIN:
                failed = buffer.failure_keys[partition_id]
                self._has_failed |= {uid: uid in failed for uid in uids}
            return materialize(partition_id, uids, *args, **kwargs)

        buffer._materialize_batch = noting
        return buffer

    def start_step(self) -> None:
        """Forgets the prompts of the step before."""
        self._has_failed.clear()

    def metrics(self, keys: Sequence[str]) -> dict[str, float]:
        """Metrics of the step's batches, whose rows have these keys; arrived sessions alone if no prompt was noted."""
        arrived_of = Counter(uid_of_key(f"{session}_0") for session in {session_of_key(key) for key in keys})
        arrived = sum(arrived_of.values())
        metrics: dict[str, float] = {names.SESSIONS_ARRIVED: arrived}
        if self._has_failed:
            configured = self._sessions * len(self._has_failed)
            failed = sum(self._sessions - arrived_of[uid] for uid, has_failed in self._has_failed.items() if has_failed)
            metrics |= {
                names.SESSIONS_CONFIGURED: configured,
                names.SESSIONS_MISSING: configured - arrived,
                names.SESSIONS_FAILED: failed,
                names.SESSIONS_EMPTY: configured - arrived - failed,
            }
        return metrics
