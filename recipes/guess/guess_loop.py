"""An agent that finds a number in four guesses; each guess is a model call, and a row."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

GUESSES = 4  # with which one can always find one of 15 numbers
BEGINNING = "My guess is"  # of each answer: the model goes on from there


class GuessLoop(AgentLoopBase):
    """Plays one session. A reply that is no number from 1 to ``top`` ends it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """The rows of the session in order; the last one has the reward."""
        number, top = int(row["reward_model"]["ground_truth"]), row["extra_info"]["top"]
        messages, guesses = list(row["raw_prompt"]), []
        outputs: list[AgentLoopOutput] = []
        while number not in guesses and len(outputs) < GUESSES:
            output = await self.call(messages, sampling_params)
            if not output.response_ids:  # the request was aborted
                break
            outputs.append(output)
            found = re.match(r"\s*(\d+)", self.tokenizer.decode(output.response_ids))
            if not found or not 1 <= int(found[1]) <= top:
                break
            guesses.append(int(found[1]))
            messages += [
                {"role": "assistant", "content": f"{BEGINNING} {guesses[-1]}"},
                {"role": "user", "content": "Higher." if guesses[-1] < number else "Lower."},
            ]
        if outputs:
            won = number in guesses
            outputs[-1].reward_score = 1.0 if won else 0.1 * len(guesses) / GUESSES
            said = {"won": float(won), "guesses": float(len(guesses))}
            outputs[-1].extra_fields["reward_extra_info"] = said
        return outputs

    async def call(
        self, messages: list[dict[str, str]], sampling_params: dict[str, Any]
    ) -> AgentLoopOutput:
        """One model call, as a row."""
        prompt_ids = await self.ct_build_initial_tokens(messages)
        prompt_ids += self.tokenizer.encode(BEGINNING, add_special_tokens=False)
        answer = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=dict(sampling_params)
        )
        length = self.rollout_config.response_length
        ids = answer.token_ids[:length]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=answer.log_probs[:length] if answer.log_probs else None,
            num_turns=2,
            metrics={},
            extra_fields=dict(answer.extra_fields),
        )
