"""The worker calls that are planned. A new one is added here; ``job_reader.py`` says when a step makes it."""

from __future__ import annotations

from dataclasses import dataclass

ACTOR, CRITIC = "actor", "critic"
"""Names of the updates in plans, metrics and messages."""
LOG_PROB, REF, VALUES = "log_prob", "ref", "values"
"""Names of the inference passes in plans, metrics and messages."""


@dataclass(frozen=True, kw_only=True)
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
        name=LOG_PROB,
        method="compute_log_prob",
        worker_group="actor_rollout_wg",
        role="actor",
        mesh="actor",
        timer="old_log_prob",
    ),
    WorkerCall(
        name=REF,
        method="compute_ref_log_prob",
        worker_group="ref_policy_wg",
        role="ref",
        mesh="ref",
        timer="ref",
    ),
    WorkerCall(
        name=VALUES,
        method="infer_batch",
        worker_group="critic_wg",
        role="critic",
        mesh="train",
        timer="values",
    ),
    WorkerCall(
        name=ACTOR,
        method="update_actor",
        worker_group="actor_rollout_wg",
        role="actor",
        mesh="actor",
        timer="update_actor",
        trains=True,
    ),
    WorkerCall(
        name=CRITIC,
        method="train_mini_batch",
        worker_group="critic_wg",
        role="critic",
        mesh="train",
        timer="update_critic",
        trains=True,
    ),
)
WORKER_GROUPS = tuple(dict.fromkeys(call.worker_group for call in CALLS))
"""Attributes of verl's trainer that hold a worker group, each once."""
CALL_BY_NAME = {call.name: call for call in CALLS}
