"""Names of the rollouts on a CPU, as values of ``actor_rollout_ref.rollout.name``."""

ROLLOUT_NAME = "transformers"
VLLM_NAME = "vllm"
