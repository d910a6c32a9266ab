"""Replies of a model that nobody has trained: scripted replies, a call of each tool, and noise that
ends."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

TEXTS = "VERL_PADDING_REPLIES"
"""Environment variable with the texts of scripted replies as JSON; where it is set, rollout servers
give no others."""
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
        self._longest_response = rollout.response_length
        self._longest_row = rollout.prompt_length + rollout.response_length
        # None is noise. The first reply is, so a loop that takes one turn sees a reply of no form.
        self._texts = [None, *texts, *_calls_of_tools(rollout)]
        self.given = 0

    def answer(
        self,
        request_id: str,
        prompt_tokens: int,
        sampling_params: dict[str, Any],
        **extra_fields: Any,
    ) -> Any:
        """verl's ``TokenOutput`` with the next reply, of log-probs of -1; the request's id seeds
        noise."""
        from verl.workers.rollout.replica import TokenOutput

        text = self._texts[self.given % len(self._texts)]
        self.given += 1
        asked = sampling_params.get("max_tokens") or self._longest_response
        limit = max(1, min(asked, self._longest_row - prompt_tokens))
        if text is None:
            draws = random.Random(f"{request_id} {self.given}")
            ids = [draws.randrange(self._ordinary) for _ in range(draws.randint(2, NOISE))]
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        eos = self._tokenizer.eos_token_id
        ids = (ids if eos is None else [*ids, eos])[:limit]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-1.0] * len(ids) if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields=extra_fields,
        )


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
