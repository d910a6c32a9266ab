"""An agent loop in verl's form whose context is reset each turn, so that each turn is a training
row of its own."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer

from verl_padding.recipes.context_reset.tasks import task_of


class ContextResetAgentLoop(AgentLoopBase):
    """Plays one session: turn after turn, each in a context of its own, until the task is done.

    Args:
        max_turns: most rows of a session.
    """

    def __init__(self, *args: Any, max_turns: int = 8, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_turns = max_turns

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Rows of the session in order; the last one carries the reward, which verl copies to the
        others.

        A turn whose context has outgrown ``data.max_prompt_length``, or whose reply comes back
        empty (a request that was aborted), ends the session. A session whose first request was
        aborted is an empty list, which verl passes over.

        Raises:
            ValueError: the first context is longer than ``data.max_prompt_length``.
        """
        task = task_of(kwargs)
        outputs: list[AgentLoopOutput] = []
        while not task.done and len(outputs) < self.max_turns:
            messages = task.messages()
            media = await self.process_multi_modal_info(messages)
            self._assert_mm_supported(bool(media))
            prompt_ids = await self.ct_build_initial_tokens(messages, images=media.get("images"))
            limit = self.rollout_config.prompt_length
            if len(prompt_ids) > limit:
                if outputs:
                    break
                raise ValueError(
                    f"data.max_prompt_length={limit}: row {kwargs.get('index')} of "
                    f"{kwargs['data_source']} starts with a context of {len(prompt_ids)} tokens. "
                    "Raise the setting, or drop such rows."
                )
            output = await self._turn(prompt_ids, media, sampling_params)
            if not output.response_ids:
                break
            outputs.append(output)
            task.react(self.tokenizer.decode(output.response_ids, skip_special_tokens=True))
        if outputs:
            # Set here, not by verl's reward loop: the reward is the session's, and no single row is
            # enough to find it.
            outputs[-1].reward_score = task.reward
            outputs[-1].extra_fields["reward_extra_info"] = task.info | {
                "turns": float(len(outputs))
            }
        return outputs

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        # verl's own method cuts a long prompt from the left, which would silently remove the
        # agent's question.
        return prompt_ids

    async def _turn(
        self, prompt_ids: list[int], media: dict[str, Any], sampling_params: dict[str, Any]
    ) -> AgentLoopOutput:
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            # Each turn has its own request id: the server must not take it for a continuation of
            # the last one.
            answer = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=dict(sampling_params),
                image_data=media.get("images"),
            )
        length = self.rollout_config.response_length
        ids = answer.token_ids[:length]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=answer.log_probs[:length] if answer.log_probs else None,
            routed_experts=answer.routed_experts,
            multi_modal_data=media,
            num_turns=2,
            metrics=metrics,
            extra_fields=dict(answer.extra_fields),
        )
