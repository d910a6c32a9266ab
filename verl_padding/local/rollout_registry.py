"""Puts the CPU's rollouts into verl's two registries of rollouts: transformers, and a vLLM that replaces verl's own."""

from types import ModuleType

from verl_padding.local.rollout_names import ROLLOUT_NAME, VLLM_NAME


def register_adapter(rollout: ModuleType) -> None:
    """The worker's side of the rollout, in ``verl.workers.rollout.base``: verl has a plain dict for it."""
    adapter = "verl_padding.local.rollout_replica.TransformersAdapter"
    rollout._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = adapter


def register_replica(replica: ModuleType) -> None:
    """The server's side of the rollout, in ``verl.workers.rollout.replica``."""

    def load() -> type:
        from verl_padding.local.rollout_replica import TransformersReplica

        return TransformersReplica

    def load_vllm() -> type:
        from verl_padding.local.vllm_replica import CpuVllmReplica

        return CpuVllmReplica

    replica.RolloutReplicaRegistry.register(ROLLOUT_NAME, load)
    replica.RolloutReplicaRegistry.register(VLLM_NAME, load_vllm)
