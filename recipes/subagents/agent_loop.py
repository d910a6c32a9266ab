"""A lead agent and its sub-agents in verl's form: one long row of the lead and a short one of each
sub-agent."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop

from verl_padding.recipes.subagents import terse_calls  # noqa: F401  (registers the format)
from verl_padding.recipes.subagents.tasks import Messages, NoSuchTaskError, Outcome, Task, task_of

LEAD, SUBAGENT = "lead", "subagent"
LEAD_TOOLS, SUBAGENT_TOOLS = ("ask", "calculate"), ("calculate",)


class PromptTooLongError(ValueError):
    """A first context that is longer than ``data.max_prompt_length``."""


class SubagentsLoop(ToolAgentLoop):
    """Plays one session. verl makes one for each, so that a session's state may be kept in it.

    Lead and sub-agents are verl's own tool agent; ``ask`` is a tool of the lead.

    Args:
        max_subagents: most sub-agents of a session; the lead is told when none is left.
        reply_tokens: most tokens of one turn; None for as many as the response may hold.
    """

    def __init__(
        self, *args: Any, max_subagents: int = 4, reply_tokens: int | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        missing = {*LEAD_TOOLS, *SUBAGENT_TOOLS} - self.tools.keys()
        if missing:
            raise ValueError(
                "actor_rollout_ref.rollout.multi_turn.tool_config_path: lead and sub-agents need "
                f"the tools {', '.join(sorted(missing))}. Set it to the recipe's tools.yaml."
            )
        self.max_subagents = max_subagents
        self.reply_tokens = reply_tokens
        self._outcome = Outcome()
        self._rows: dict[int, AgentLoopOutput] = {}
        self._replies: dict[int, str] = {}

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> list[AgentLoopOutput]:
        """Rows of the sub-agents in the order in which they were asked, then the lead's, with the
        session's reward.

        A sub-agent that fails has no row, and the lead is told what went wrong. A session whose
        lead got no reply (an aborted request) is an empty list, which verl skips.

        Raises:
            PromptTooLongError: the lead's task is longer than ``data.max_prompt_length``.
        """
        self._task: Task = task_of(kwargs)
        self._priority = int(priority)
        self._sampling = dict(sampling_params)
        if self.reply_tokens is not None:
            self._sampling["max_tokens"] = self.reply_tokens
        try:
            lead = await self._play(0, self._task.lead_messages(), LEAD_TOOLS)
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"data.max_prompt_length={self.prompt_length}: row {kwargs.get('index')} of "
                f"{kwargs['data_source']} starts with {error}. Raise the setting, or drop such "
                "rows."
            ) from error
        if lead is None:
            return []
        self._outcome.last_reply = self._last_reply(lead)
        lead.reward_score = self._task.reward(self._outcome)
        lead.extra_fields["reward_extra_info"] = self._task.info(self._outcome) | {
            "subagents": float(len(self._rows)),
            "failed_subagents": float(self._outcome.n_asked - len(self._rows)),
        }
        return [*(self._rows[place] for place in sorted(self._rows)), lead]

    # What the tools find as agent_data.desk, see delegation.Desk.

    @property
    def replies(self) -> list[str]:
        return [self._replies[place] for place in sorted(self._replies)]

    @property
    def calculated(self) -> str | None:
        return self._outcome.calculated

    @calculated.setter
    def calculated(self, value: str) -> None:
        self._outcome.calculated = value

    async def ask(self, question: str) -> str:
        self._outcome.n_asked += 1
        place = self._outcome.n_asked
        if place > self.max_subagents:
            return "error: no sub-agent is left"
        try:
            row = await self._play(place, self._task.subagent_messages(question), SUBAGENT_TOOLS)
        except (NoSuchTaskError, PromptTooLongError) as error:
            return f"error: {error}"
        if row is None:
            return "error: the sub-agent did not reply"
        reply = self._last_reply(row)
        self._rows[place], self._replies[place] = row, reply
        self._outcome.answers[question] = reply
        return reply

    async def _play(
        self, place: int, messages: Messages, tools: tuple[str, ...]
    ) -> AgentLoopOutput | None:
        """Runs one agent from its first context to its end; None if it generated nothing. Place 0
        is the lead's."""
        output = await super().run(
            self._sampling,
            # verl makes the request's name from it in deterministic jobs, so each agent needs its
            # own.
            priority=self._priority * (self.max_subagents + 1) + place,
            raw_prompt=messages,
            extra_info={"tool_selection": list(tools)},
            tools_kwargs={},
        )
        # With padding.baseline=role, rows are compared with those of their own role.
        output.extra_fields["role"] = LEAD if place == 0 else SUBAGENT
        return output if any(output.response_mask) else None

    def _last_reply(self, output: AgentLoopOutput) -> str:
        """What the agent said in its last turn: the last of its own tokens in a row."""
        pairs = zip(output.response_mask, output.response_ids, strict=True)
        runs = [
            [token for _, token in run]
            for mine, run in groupby(pairs, key=lambda pair: pair[0])
            if mine
        ]
        return str(self.tokenizer.decode(runs[-1], skip_special_tokens=True))

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        state = await super()._handle_pending_state(agent_data, sampling_params)
        if len(agent_data.prompt_ids) > self.prompt_length:
            raise PromptTooLongError(f"a context of {len(agent_data.prompt_ids)} tokens")
        if (
            "ask" in agent_data._active_tools
        ):  # the lead has this tool; a sub-agent's results stay its own
            agent_data.desk = self
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        is_lead = getattr(agent_data, "desk", None) is self
        return AgentState.TERMINATED if is_lead and self._task.is_done(self._outcome) else state

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        # verl's own method cuts a long prompt from the left, which would silently remove the
        # agent's question.
        return prompt_ids
