"""verl's agent loop manager and its workers, for sessions of several rows and for dispatches of a
few prompts.

A padded trainer names the manager in verl's setting for it. No module of the trainers imports this
one: a worker's process imports it first.
"""

from typing import Any

import ray
from tensordict import TensorDict
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

REWARD, RENAMED = "reward", "own_reward"
"""Key of a reward function's result under which verl's validation keeps the scores, and what it is
called instead."""

VerlWorker: Any = (
    AgentLoopWorkerTQ.__ray_metadata__.modified_class
)  # Ray's own class cannot be extended


class PaddedAgentLoopWorker(VerlWorker):
    """verl's worker; every row of a session has what a teacher says of it, and no reward is counted
    twice."""

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        # verl asks the teacher about the last row alone, and puts only fields that the first row
        # has.
        for earlier in output[:-1] if isinstance(output, list) else []:
            ids = {"prompt_ids": earlier.prompt_ids, "response_ids": earlier.response_ids}
            await self._compute_teacher_logprobs(
                earlier, **ids, validate=validate, sample_kwargs=kwargs
            )
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        await super()._compute_score(outputs, kwargs=kwargs)
        for output in outputs:
            info = output.extra_fields.get("reward_extra_info")
            if info and REWARD in info:
                renamed = {
                    RENAMED if name == REWARD else name: value for name, value in info.items()
                }
                output.extra_fields["reward_extra_info"] = renamed


class PaddedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager; each dispatch begins with the worker after the last one of the dispatch
    before."""

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(PaddedAgentLoopWorker)

    def generate_sequences(self, prompts: TensorDict) -> None:
        super().generate_sequences(prompts)
        # verl assigns chunks from the first worker on: prompts that come one by one would all be
        # that worker's.
        workers = self.agent_loop_workers
        served = len(prompts.chunk(len(workers)))
        self.agent_loop_workers = workers[served:] + workers[:served]
