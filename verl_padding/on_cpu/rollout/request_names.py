"""Names of rollout requests that are the same in each run: the rollout server is seeded by them.

verl's client sends each request under a random id, and sessions run side by side. A name says the
step, the prompt, the session, which of the session's asyncio tasks asks (a loop starts its
sub-agents as tasks), and how often it has asked.
"""

import asyncio
import functools
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from verl_padding.on_cpu.verl_patches import ROLLOUT_NAME
from verl_padding.pads.prompt_order import place_of


@dataclass
class Agent:
    """One asyncio task of a session; no two in a job have one name if no two rows of the data set
    are alike."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)

    def name_next(self, work: str) -> str:
        """The name of its next turn, or of a task that it starts, by the task's coroutine: others
        may come between."""
        # The third turn of the second sub-agent that a session starts is
        # "training step 4 prompt 4.1 session 0 Loop.subagent 2 turn 3".
        self.counts[work] += 1
        return f"{self.name} {work} {self.counts[work]}"


_agent: ContextVar[Agent | None] = ContextVar("verl_padding_agent", default=None)


def name_sessions(agent_loop: Any) -> None:
    """Lets each session of verl's ``AgentLoopWorker`` know its name; this can go when verl's client
    knows it."""
    run = agent_loop.AgentLoopWorker._run_agent_loop

    # A plain function under verl's name: Ray pickles an actor's methods by name where it can.
    # Pickled by value, verl's method would see a copy of its module's globals, without the agent
    # loops that its worker has registered.
    @functools.wraps(run)
    async def in_session(
        self: Any, sampling_params: Any, trajectory: Mapping[str, Any], **fields: Any
    ) -> Any:
        name_tasks(asyncio.get_running_loop())
        # Until the end of the session's task, which verl starts for it.
        _agent.set(Agent(session_name(trajectory, fields)))
        return await run(self, sampling_params, trajectory, **fields)

    agent_loop.AgentLoopWorker._run_agent_loop = in_session


def name_requests(llm_server: Any) -> None:
    """Lets verl's ``LLMServerClient`` send a session's request to this rollout under its name."""
    verls_name = llm_server.LLMServerClient._vllm_request_id

    def name(self: Any, request_id: str) -> str:
        agent = _agent.get()
        if agent is None or self.config.actor_rollout_ref.rollout.name != ROLLOUT_NAME:
            return str(verls_name(self, request_id))
        return agent.name_next("turn")

    llm_server.LLMServerClient._vllm_request_id = name


def session_name(trajectory: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """The same in each run of a job, and a different one for each session.

    Of the `trajectory`, ``rollout_n`` distinguishes neighbours with one index; `fields` are the row
    and ``session_id``.
    """
    # The trainer's place is the better name if there is one: a data set may hold a row twice.
    if place := place_of(str(fields.get("uid"))):
        prompt = f"{place[0]}.{place[1]}"
    else:
        # Not repr: that of an image has its place in memory.
        text = json.dumps(
            fields.get("raw_prompt"), sort_keys=True, default=lambda thing: type(thing).__name__
        )
        prompt = f"{fields.get('index')}.{trajectory['rollout_n']}.{zlib.crc32(text.encode()):08x}"
    what = "validation" if trajectory["validate"] else "training"
    return f"{what} step {trajectory['step']} prompt {prompt} session {fields.get('session_id', 0)}"


@functools.cache
def name_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Makes each task that a session starts an agent, numbered in the order of starting; once a
    loop."""
    before = loop.get_task_factory()

    def start(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Future[Any]:
        agent = _agent.get()
        # A caller that passes a context shares it, and the agent in it, with the task.
        if agent is not None and kwargs.get("context") is None:
            name = agent.name_next(getattr(work, "__qualname__", type(work).__qualname__))
            kwargs["context"] = copy_context()
            kwargs["context"].run(_agent.set, Agent(name))
        return before(loop, work, **kwargs) if before else asyncio.Task(work, loop=loop, **kwargs)

    loop.set_task_factory(start)
