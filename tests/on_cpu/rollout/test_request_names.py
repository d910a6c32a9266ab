"""Requests of a session have the same names in each run, whatever is answered first."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop import agent_loop as verl_agent_loop
from verl.workers.rollout import llm_server as verl_llm_server

from verl_padding.on_cpu.rollout.request_names import name_requests, name_sessions
from verl_padding.pads.prompt_order import ordered_uid

PROMPT = [{"role": "user", "content": "three?"}]


class Session(verl_agent_loop.AgentLoopWorker):
    """verl's worker, with an agent loop put in the place of those that it would look up."""

    def __init__(self, play):
        self._play = play

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, **kwargs):
        return await self._play(**kwargs)


class Client(verl_llm_server.LLMServerClient):
    """verl's client, whose servers answer after a random while and note under which name they were
    asked for what."""

    def __init__(self):
        rollout = SimpleNamespace(rollout=SimpleNamespace(name="transformers"))
        super().__init__(SimpleNamespace(actor_rollout_ref=rollout))
        self.asked: dict[str, str] = {}

    async def ask(self, what):
        await asyncio.sleep(random.random() / 500)  # tokenizing, in a thread
        name = self._vllm_request_id("verl's own")
        assert name not in self.asked
        self.asked[name] = what
        await asyncio.sleep(random.random() / 500)


@pytest.fixture(autouse=True, scope="module")
def _patched():
    name_sessions(SimpleNamespace(AgentLoopWorker=Session))
    name_requests(verl_llm_server)


def run(play, **prompt):
    """Three sessions of two prompts, side by side, as verl's worker starts them."""

    async def session(index, number):
        trajectory = {"step": 4, "sample_index": index, "rollout_n": 0, "validate": False}
        fields = {
            "index": index,
            "session_id": number,
            "raw_prompt": PROMPT,
            "uid": ordered_uid(4, index),
        } | prompt
        await Session(play)._run_agent_loop({}, trajectory=trajectory, agent_name="any", **fields)

    async def sessions():
        await asyncio.gather(*[session(index, number) for index in range(2) for number in range(3)])

    asyncio.run(sessions())


def names_of(**prompt):
    client = Client()

    async def play(**fields):
        await with_subagents(client, f"{fields['index']} {fields['session_id']}")

    run(play, **prompt)
    return client.asked


async def with_subagents(client, who):
    """A lead whose sub-agents run side by side, and ask alike; tasks of libraries come and go
    between."""

    async def subagent(place):
        if random.random() < 0.5:
            await asyncio.create_task(something_else())
        for turn in range(4):
            await client.ask(f"{who} sub-agent {place} {turn}")

    async def something_else():
        await asyncio.sleep(0)

    await client.ask(f"{who} first")
    for _ in range(2):
        for _ in range(random.randrange(3)):
            await asyncio.create_task(something_else())
        await asyncio.gather(*[subagent(place) for place in range(3)])
        await client.ask(f"{who} then")


@pytest.mark.parametrize("uid", [None, "verl's own"])
def test_each_request_has_the_same_name_in_each_run(uid):
    prompt = {"uid": uid} if uid else {}

    first = names_of(**prompt)

    assert len(first) == 6 * (1 + 2 * (3 * 4 + 1))
    for _ in range(4):
        again = names_of(**prompt)
        assert again == first
    assert list(again) != list(first), "they never came in another order"
    if not uid:
        who = "with_subagents.<locals>.subagent 5 turn 4"
        assert f"training step 4 prompt 4.1 session 2 {who}" in first
