"""The rollouts of a CPU, as ``actor_rollout_ref.rollout.name`` has them."""

ROLLOUT_NAME = "transformers"
VLLM_NAME = "vllm"
