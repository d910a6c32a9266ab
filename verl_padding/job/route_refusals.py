"""Refuses a replay of routes (R2, R3) where nothing records them."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from verl_padding.errors import PaddingConfigError
from verl_padding.job.role_engine import RoleEngine

REPLAYS = ("megatron", "veomni")
"""Strategies whose engines replay routes."""
RECORDS = ("vllm", "sglang")
"""verl's rollouts that record routes when told."""
RECORDS_NONE = ("transformers",)
"""Those of this package, which do not."""
VERLS_LOOPS = ("single_turn_agent", "tool_agent")
"""Agent loops that hand on the routes of the rollout, and have none of their own."""


def refuse_routes_of_no_experts(actor: RoleEngine) -> None:
    """For a model without experts.

    Raises:
        PaddingConfigError: verl's engine would find no router in its first pass. Megatron's does not look for one to
            replay routes of a rollout (R3).
    """
    ends = {"megatron": ("R2",), "veomni": ("R2", "R3")}.get(actor.strategy, ())
    if ends and (mode := actor.config.router_replay.mode) in ends:
        raise PaddingConfigError(
            f"{actor.section}.{actor.strategy}.router_replay.mode={mode}: the model has no experts, whose routes could "
            "be replayed. Set it to disabled."
        )


def refuse_missing_routes(config: DictConfig, actor: RoleEngine, *, passes: bool) -> None:
    """
    A rollout, an agent loop or code that the plug-in does not know may bring routes of its own, and passes.

    Args:
        passes: whether a pass of the actor comes before its update, in which R2 records.

    Raises:
        PaddingConfigError: verl's engine would find no routes in its first micro-batch.
    """
    if actor.strategy not in REPLAYS or _may_bring_routes(config):
        return
    mode, setting = actor.config.router_replay.mode, f"{actor.section}.{actor.strategy}.router_replay.mode"
    if mode == "R2" and not passes:
        raise PaddingConfigError(
            f"{setting}=R2: replays the routes of the actor's pass before its update, which there is not with "
            "algorithm.rollout_correction.bypass_mode=True. Set that to False, or the mode to disabled or, with vLLM "
            "or SGLang, to R3."
        )
    rollout = config.actor_rollout_ref.rollout
    name = rollout.get("name")  # which a job that is only planned may leave out
    if mode == "R3" and (name in RECORDS_NONE or (name in RECORDS and not rollout.enable_rollout_routing_replay)):
        other = "R2" if passes else "disabled"
        raise PaddingConfigError(
            f"{setting}=R3: replays the routes of the rollout, and actor_rollout_ref.rollout.name={name} with "
            f"enable_rollout_routing_replay={rollout.enable_rollout_routing_replay} records none. Set the mode to "
            f"{other}, or the other to True with vLLM or SGLang."
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
