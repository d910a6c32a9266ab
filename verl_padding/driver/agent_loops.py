"""verl's agent loop manager and its workers, for sessions of several rows.

A padded trainer names the manager in verl's setting for it. No module of the trainers imports this
one: a worker's process imports it first.
"""

from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

# Ray's own class cannot be extended.
VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class PaddedAgentLoopWorker(VerlWorker):
    """verl's worker; every row of a session has what a teacher says of it."""

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        # verl asks the teacher about the last row alone, and puts only fields that the first row
        # has.
        for earlier in output[:-1] if isinstance(output, list) else []:
            await self._compute_teacher_logprobs(
                earlier,
                prompt_ids=earlier.prompt_ids,
                response_ids=earlier.response_ids,
                validate=validate,
                sample_kwargs=kwargs,
            )
        await super()._agent_loop_postprocess(output, validate, **kwargs)


class PaddedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, of our workers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(PaddedAgentLoopWorker)
