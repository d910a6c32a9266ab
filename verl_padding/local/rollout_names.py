"""Puts the transformers rollout into verl's two registries of rollouts, by name."""

from types import ModuleType

ROLLOUT_NAME = "transformers"


def register_adapter(rollout: ModuleType) -> None:
    """The worker's side of the rollout, in ``verl.workers.rollout.base``: verl has a plain dict for it."""
    adapter = "verl_padding.local.rollout_replica.TransformersAdapter"
    rollout._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = adapter


def register_replica(replica: ModuleType) -> None:
    """The server's side of the rollout, in ``verl.workers.rollout.replica``."""

    def load() -> type:
        from verl_padding.local.rollout_replica import TransformersReplica

        return TransformersReplica

    replica.RolloutReplicaRegistry.register(ROLLOUT_NAME, load)
