"""Replies of a model that nobody has trained: scripted replies, a call of each tool, and noise that
ends."""

import json
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from verl_padding.on_cpu.rollout.batch_generation import Generation

NOISE = 24  # most tokens of a reply that nobody wrote
EXAMPLES = {"string": "1 + 2", "integer": 1, "number": 1.5, "boolean": True}
"""Type in a tool's schema -> an argument of it."""


class Replies:
    """Noise and each text in turn; a model with random weights would call no tool and never end a
    turn.

    Args:
        rollout: the job's section ``actor_rollout_ref.rollout``.
        texts: replies of the user's.
    """

    def __init__(self, tokenizer: Any, rollout: Any, texts: Sequence[str]):
        self._tokenizer = tokenizer
        # Noise is of ordinary tokens: an image's would break the row's position ids.
        self._ordinary = min([len(tokenizer), *tokenizer.get_added_vocab().values()])
        # None is noise. The first reply is, so a loop that takes one turn sees a reply of no form.
        self._texts = cycle([None, *texts, *_calls_of_tools(rollout)])

    def answer(self, request: Generation) -> None:
        """Gives a request the next reply, of log-probs of -1, as far as it has room."""
        if (text := next(self._texts)) is None:
            draws = request.random
            ids = [draws.randrange(self._ordinary) for _ in range(draws.randint(2, NOISE))]
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        eos = self._tokenizer.eos_token_id
        ids = ids if eos is None else [*ids, eos]
        request.token_ids = ids[: request.max_new_tokens]
        request.max_new_tokens = len(request.token_ids)  # it is finished
        request.log_probs = [-1.0] * len(request.token_ids)


def _calls_of_tools(rollout: Any) -> Iterator[str]:
    """A call of each tool in the form of verl's parser ``hermes``; other forms take ``--reply``."""
    turns = rollout.multi_turn
    if not (turns.tool_config_path or turns.function_tool_path) or turns.format != "hermes":
        return
    from verl.tools.tool_registry import load_all_tools

    for tool in load_all_tools(
        tool_config_path=turns.tool_config_path, function_tool_path=turns.function_tool_path
    ):
        function = tool.tool_schema.model_dump(exclude_none=True)["function"]
        schemas = function.get("parameters", {}).get("properties", {})
        arguments = {name: _example(schema) for name, schema in schemas.items()}
        call = json.dumps({"name": function["name"], "arguments": arguments})
        yield f"<tool_call>\n{call}\n</tool_call>"


def _example(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    return EXAMPLES.get(schema.get("type", "string"), "1")
