"""Refuses a replay of the rollout's routes (R3) where nothing records them."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from verl_padding.errors import PaddingConfigError
from verl_padding.verl_job.role_engine import RoleEngine

REPLAYS = ("megatron", "veomni")
"""Strategies whose engines replay routes."""
RECORDS = ("vllm", "sglang")
"""verl's rollouts that record routes when told."""
RECORDS_NONE = ("transformers",)
"""Those of this package, which do not."""
VERLS_LOOPS = ("single_turn_agent", "tool_agent")
"""Agent loops that hand on the routes of the rollout, and have none of their own."""


def refuse_missing_routes(config: DictConfig, actor: RoleEngine) -> None:
    """
    A rollout, an agent loop or code that the plug-in does not know may bring routes of its own, and passes.

    Raises:
        PaddingConfigError: verl's engine would find no routes in its first micro-batch.
    """
    rollout = config.actor_rollout_ref.rollout
    if actor.strategy not in REPLAYS or actor.config.router_replay.mode != "R3" or _may_bring_routes(config):
        return
    name = rollout.get("name")  # which a job that is only planned may leave out
    if name in RECORDS_NONE or (name in RECORDS and not rollout.enable_rollout_routing_replay):
        raise PaddingConfigError(
            f"{actor.section}.{actor.strategy}.router_replay.mode=R3: replays the routes of the rollout, and "
            f"actor_rollout_ref.rollout.name={name} with enable_rollout_routing_replay="
            f"{rollout.enable_rollout_routing_replay} records none. Set the mode to R2, or the other to True with "
            "vLLM or SGLang."
        )


def _may_bring_routes(config: DictConfig) -> bool:
    agent = config.actor_rollout_ref.rollout.agent
    own_code = (
        agent.get("agent_loop_config_path"),
        agent.get("agent_loop_manager_class"),
        config.actor_rollout_ref.model.get("external_lib"),
        os.environ.get("VERL_USE_EXTERNAL_MODULES"),
    )
    return any(own_code) or agent.default_agent_loop not in VERLS_LOOPS
