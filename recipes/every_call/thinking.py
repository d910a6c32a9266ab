"""The agent with a model that thinks before it answers, and whose chat template leaves the
reasoning out afterwards."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_padding.recipes.every_call.agent_loop import EveryCallLoop
from verl_padding.recipes.every_call.tasks import Messages

THINKING_ENDS = "</think>"


class ThinkingLoop(EveryCallLoop):
    """Each call's prompt is what the chat template makes of the messages so far.

    Templates as Qwen3's leave out what was thought in earlier turns. So no row begins with the
    whole row before it: the rows of a session share what was said, and part where the reasoning
    began.

    Args:
        max_thinking: most tokens of reasoning in a call. Then it is ended for the model, as a
            thinking budget does.
    """

    def __init__(self, *args: Any, max_thinking: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_thinking = max_thinking
        self._end = self.tokenizer.convert_tokens_to_ids(THINKING_ENDS)
        if not isinstance(self._end, int) or self._end == self.tokenizer.unk_token_id:
            raise ValueError(f"the model's tokenizer has no token {THINKING_ENDS}: use every_call")

    def _answer(self, reply: str) -> str:
        return reply.partition(THINKING_ENDS)[2]

    async def _next_context(
        self, output: AgentLoopOutput, said: Messages, messages: Messages
    ) -> list[int]:
        return list(await self.ct_build_initial_tokens(messages))

    async def _generate(
        self, context: list[int], sampling_params: dict[str, Any]
    ) -> tuple[TokenOutput, list[int]]:
        """The reasoning, its end, and the answer. An end that the model was given is none of its
        tokens."""
        limits = {"max_tokens": self.max_thinking, "stop_token_ids": [self._end]}
        thought = await self._ask(context, sampling_params | limits)
        ids, log_probs = thought.token_ids, thought.log_probs
        mask = [1] * len(ids)
        if len(ids) < self.max_thinking and self._end not in ids:
            return thought, mask  # aborted, or the model has ended its turn
        if self._end not in ids:
            ids, mask = [*ids, self._end], [*mask, 0]
            log_probs = log_probs and [*log_probs, 0.0]
        limits = {"max_tokens": self.rollout_config.response_length - self.max_thinking - 1}
        answer = await self._ask(context + ids, sampling_params | limits)
        whole = {
            "token_ids": ids + answer.token_ids,
            "log_probs": log_probs and log_probs + (answer.log_probs or []),
        }
        return answer.model_copy(update=whole), mask + [1] * len(answer.token_ids)
