"""Tool calls of one character, for a model that is too small to write JSON:
``multi_turn.format=terse``."""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


@ToolParser.register("terse")
class TerseToolParser(ToolParser):
    """``1`` to ``9`` ask that many sub-agents for parts 1, 2, ..; ``0`` adds up what they have
    answered.

    Only tools that the agent has are called; any other reply is an answer.
    """

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        command = text[:1]
        names = {tool.function.name for tool in tools or []}
        if not (command.isascii() and command.isdigit()):
            return text, []
        if command == "0":
            calls = [FunctionCall(name="calculate", arguments=json.dumps({"expression": "sum"}))]
        else:
            parts = range(1, int(command) + 1)
            calls = [
                FunctionCall(name="ask", arguments=json.dumps({"question": str(part)}))
                for part in parts
            ]
        return text, [call for call in calls if call.name in names]
