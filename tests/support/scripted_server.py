"""A rollout server for tests of agent loops: it answers by a script."""

from collections.abc import Iterable
from typing import Any

from verl.workers.rollout.replica import TokenOutput


class ScriptedServer:
    """Answers each request with the next reply, and remembers what it was asked.

    Args:
        tokenizer: a ``PreTrainedTokenizerFast``, of prompts and replies.
        replies: text of each answer, in the order of the requests.
    """

    def __init__(self, tokenizer: Any, replies: Iterable[str]):
        self.tokenizer, self.replies = tokenizer, list(replies)
        self.requests: list[tuple[str, str]] = []
        """Name and prompt of each request."""

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: Any = None
    ) -> TokenOutput:
        self.requests.append((request_id, self.tokenizer.decode(prompt_ids)))
        ids = self.tokenizer.encode(self.replies.pop(0))
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"global_steps": 3})
