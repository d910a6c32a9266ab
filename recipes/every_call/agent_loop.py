"""An agent loop in verl's form whose context grows, and whose every model call is a row, as
gateways record them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from verl_padding.prefix_sharing.detection import EXTENDS
from verl_padding.recipes.every_call.tasks import Messages, task_of


class EveryCallLoop(AgentLoopBase):
    """Plays one session: each call's prompt is all that was said before, and each call is a row.

    Args:
        max_calls: most rows of a session.
    """

    def __init__(self, *args: Any, max_calls: int = 8, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_calls = max_calls

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Rows of the session in order; the last one carries the reward, which verl copies to the
        others.

        Each row says which row it goes on from, which ``padding.advantages=session`` reads. A
        context that outgrows ``data.max_prompt_length``, or an empty reply (a request that was
        aborted), ends the session. A session whose first request was aborted is an empty list,
        which verl passes over.

        Raises:
            ValueError: the first context is longer than ``data.max_prompt_length``.
        """
        task = task_of(kwargs)
        messages = task.messages()
        context = await self.ct_build_initial_tokens(messages)
        limit = self.rollout_config.prompt_length
        if len(context) > limit:
            raise ValueError(
                f"data.max_prompt_length={limit}: row {kwargs.get('index')} of "
                f"{kwargs['data_source']} starts with a context of {len(context)} tokens. Raise "
                "the setting, or drop such rows."
            )
        outputs: list[AgentLoopOutput] = []
        while not task.done and len(outputs) < self.max_calls and len(context) <= limit:
            output = await self._call(context, sampling_params)
            if not output.response_ids:
                break
            if outputs and _begins_with(context, outputs[-1]):
                output.extra_fields[EXTENDS] = len(outputs) - 1
            outputs.append(output)
            output.num_turns = 2 * len(outputs)  # of the conversation up to here
            reply = self.tokenizer.decode(output.response_ids, skip_special_tokens=True)
            told = task.react(self._answer(reply))
            said = [*messages, {"role": "assistant", "content": reply}]
            messages = [*said, {"role": "user", "content": told}]
            context = await self._next_context(output, said, messages)
        if outputs:
            # Set here, not by verl's reward loop: the reward is the session's, and no single row is
            # enough to find it.
            outputs[-1].reward_score = task.reward
            outputs[-1].extra_fields["reward_extra_info"] = task.info | {
                "calls": float(len(outputs))
            }
        return outputs

    def _answer(self, reply: str) -> str:
        """What the task sees of a reply."""
        return reply

    async def _next_context(
        self, output: AgentLoopOutput, said: Messages, messages: Messages
    ) -> list[int]:
        """All tokens of a call, and what was said after it."""
        whole, _, _ = await self.ct_merge_assistant_token(
            output.prompt_ids, output.response_ids, []
        )
        merged, _, _ = await self.ct_merge_context_msg(said, messages, whole.token_ids, [])
        return list(merged.token_ids)

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        # verl's own method cuts a long prompt from the left: rows would no longer begin with the
        # ones before them.
        return prompt_ids

    async def _call(self, context: list[int], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            answer, mask = await self._generate(context, sampling_params)
        length = self.rollout_config.response_length
        ids = answer.token_ids[:length]
        return AgentLoopOutput(
            prompt_ids=context,
            response_ids=ids,
            response_mask=mask[:length],
            response_logprobs=answer.log_probs[:length] if answer.log_probs else None,
            routed_experts=answer.routed_experts,
            num_turns=2,
            metrics=metrics,
            extra_fields=dict(answer.extra_fields),
        )

    async def _generate(
        self, context: list[int], sampling_params: dict[str, Any]
    ) -> tuple[TokenOutput, list[int]]:
        """What the model answers, and a 1 for each token that it has sampled."""
        answer = await self._ask(context, sampling_params)
        return answer, [1] * len(answer.token_ids)

    async def _ask(self, context: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=context, sampling_params=dict(sampling_params)
        )


def _begins_with(context: list[int], output: AgentLoopOutput) -> bool:
    row = output.prompt_ids + output.response_ids
    return context[: len(row)] == row
