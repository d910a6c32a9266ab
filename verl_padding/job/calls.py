"""The worker calls that are planned. A new one is added here; ``verl_job.py`` says when a step
makes it."""

from dataclasses import dataclass

ACTOR, CRITIC = "actor", "critic"
LOG_PROB, REF, VALUES = "log_prob", "ref", "values"
"""Names of the updates and of the inference passes in plans, metrics and messages."""


@dataclass(frozen=True)
class WorkerCall:
    """A call of verl's trainer to its workers."""

    name: str
    """Its name in plans, metrics and messages."""
    method: str
    """Method of verl's worker group."""
    role: str
    """Role whose engine answers: ``actor``, ``ref`` or ``critic``."""
    trains: bool = False
    """Whether it trains on its rows, cut into mini-batches."""

    @property
    def worker_group(self) -> str:
        """Attribute of verl's trainer that holds the worker group."""
        return WORKER_GROUPS[self.role]

    @property
    def mesh(self) -> str:
        """Mesh by which verl's dispatch asks the worker group for its ranks."""
        return "train" if self.role == "critic" else self.role


WORKER_GROUPS = {"actor": "actor_rollout_wg", "ref": "ref_policy_wg", "critic": "critic_wg"}
"""Role -> the attribute of verl's trainer that holds its worker group."""
CALLS = (
    WorkerCall(LOG_PROB, "compute_log_prob", "actor"),
    WorkerCall(REF, "compute_ref_log_prob", "ref"),
    WorkerCall(VALUES, "infer_batch", "critic"),
    WorkerCall(ACTOR, "update_actor", "actor", trains=True),
    WorkerCall(CRITIC, "train_mini_batch", "critic", trains=True),
)
CALL_BY_NAME = {call.name: call for call in CALLS}
