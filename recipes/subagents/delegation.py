"""Asking a sub-agent as a tool, in verl's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Desk(Protocol):
    """What a session's tools can do for its lead agent, found as ``agent_data.desk``."""

    replies: list[str]
    """What sub-agents have answered so far, in the order in which they were asked."""
    calculated: str | None
    """The last value that was calculated."""

    async def ask(self, question: str) -> str:
        """Has a sub-agent work on a question; returns its reply, or ``error: `` and what went
        wrong."""
        ...


def argument(parameters: Any, name: str) -> str:
    """An argument as text; empty if the model did not write it, since a model may write
    anything."""
    return str(parameters.get(name, "")) if isinstance(parameters, Mapping) else ""


class AskTool(BaseTool):
    """``ask(question)``: a sub-agent with a context of its own answers."""

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any
    ) -> tuple:
        """The sub-agent's reply."""
        desk: Desk = kwargs["agent_data"].desk
        return ToolResponse(text=await desk.ask(argument(parameters, "question"))), 0.0, {}
