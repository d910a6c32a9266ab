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
    worker_group: str
    """Attribute of verl's trainer that holds the worker group."""
    role: str
    """Role whose engine answers: ``actor``, ``ref`` or ``critic``."""
    mesh: str
    """Mesh by which verl's dispatch asks a worker group for its ranks."""
    timer: str
    """verl's name for the seconds that the call takes."""
    trains: bool = False
    """Whether it trains on its rows, cut into mini-batches."""


CALLS = (
    WorkerCall(
        LOG_PROB,
        "compute_log_prob",
        "actor_rollout_wg",
        "actor",
        mesh="actor",
        timer="old_log_prob",
    ),
    WorkerCall(REF, "compute_ref_log_prob", "ref_policy_wg", "ref", mesh="ref", timer="ref"),
    WorkerCall(VALUES, "infer_batch", "critic_wg", "critic", mesh="train", timer="values"),
    WorkerCall(
        ACTOR,
        "update_actor",
        "actor_rollout_wg",
        "actor",
        mesh="actor",
        timer="update_actor",
        trains=True,
    ),
    WorkerCall(
        CRITIC,
        "train_mini_batch",
        "critic_wg",
        "critic",
        mesh="train",
        timer="update_critic",
        trains=True,
    ),
)
WORKER_GROUPS = tuple(dict.fromkeys(call.worker_group for call in CALLS))
"""Attributes of verl's trainer that hold a worker group, each once."""
CALL_BY_NAME = {call.name: call for call in CALLS}
