"""verl's agent loop workers and manager beside ours, on the real TransferQueue, without Ray actors.

Each test shows what verl does, too: the day that verl's side fails, our class for it can go.
"""

import asyncio

import pytest
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from tests.support.rows_in_queue import PARTITION, queue_content
from verl_padding.driver.agent_loops import PaddedAgentLoopWorker, VerlWorker
from verl_padding.pads.queue import row_schemas

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

TEACHER = "teacher_logprobs"


class Teacher:
    """Says of each token its number, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def compute_teacher_logprobs_single(self, *, sequence_ids, **_):
        self.asked.append(sequence_ids)
        ids = torch.tensor(sequence_ids, dtype=torch.int32).unsqueeze(1)
        return ids, -ids.float()


def worker_of(kind, **attributes):
    worker = object.__new__(kind)
    plain = {
        "processor": None,
        "reward_loop_worker_handles": None,
        "distillation_enabled": False,
        "hf_model_type": None,
    }
    worker.__dict__.update(
        {**plain, "mm_processor_kwargs": {}, "teacher_key": "data_source", **attributes}
    )
    return worker


def row(first_token, *, tokens=3):
    ids = list(range(first_token, first_token + tokens))
    return AgentLoopOutput(
        prompt_ids=ids[:1],
        response_ids=ids[1:],
        response_mask=[1] * (tokens - 1),
        response_logprobs=[-1.0] * (tokens - 1),
        reward_score=1.0,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": 1, "max_global_steps": 1, "reward_extra_info": {}},
    )


def put(worker, uid, *sessions):
    """Sessions of a prompt, as an agent loop returns them: a list of rows, or a row by itself."""
    of_prompt = {
        "global_steps": 1,
        "data_source": "toy",
        "reward_model": {"ground_truth": "4"},
        "raw_prompt": [],
    }

    async def run():
        for number, rows in enumerate(sessions):
            await worker._agent_loop_postprocess(
                rows, False, uid=uid, session_id=number, **of_prompt
            )

    asyncio.run(run())


@pytest.mark.parametrize("kind", [VerlWorker, PaddedAgentLoopWorker])
def test_every_row_of_a_session_has_what_the_teacher_says(kind):
    teacher = Teacher()
    worker = worker_of(kind, distillation_enabled=True, teacher_server_manager=teacher)
    put(worker, "a", [row(5), row(20, tokens=4)], row(40, tokens=6))
    queued = list(queue_content())
    found = {
        key: sorted(names)
        for names, keys in row_schemas(queued, PARTITION)[0].items()
        for key in keys
    }
    with_teacher = {key for key, names in found.items() if TEACHER in names}
    if kind is VerlWorker:
        assert with_teacher == {"a_1_0"}, "verl says what a teacher says of each row by now"
        assert len(teacher.asked) == 2
        return
    assert with_teacher == {"a_0_0", "a_0_1", "a_1_0"}
    for key in queued:
        data = tq.kv_batch_get(
            keys=[key], partition_id=PARTITION, select_fields=["input_ids", TEACHER]
        )
        (tokens,), (said,) = data["input_ids"].unbind(), data[TEACHER].unbind()
        assert said.flatten().tolist() == [-float(token) for token in tokens]
