"""Whatever verl's data set, agent loops, reward managers and reward functions write into rows, pads
can be made for."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from tests.support.padded_rows import plan_for, upsample
from tests.support.played import ScriptedServer
from tests.support.rows_in_queue import PARTITION, queue_content
from tests.support.verl_config import compose_job
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.pads.planned_call import COLUMN_DTYPES, IS_PADDING
from verl_padding.pads.queue import read_rows
from verl_padding.pads.template import PadTemplate

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

SESSIONS = 3
ANSWERS = {
    # what its score is -> data source that verl gives the reward function, a right answer, what it
    # is compared with
    "a number": ("openai/gsm8k", "#### 42", "42"),
    "a dict": ("math_dapo", "Answer: 42", "42"),
    "one of several answers": ("searchR1_nq", "<answer>42</answer>", {"target": ["42"]}),
}


LOOPS = sorted(
    name for name, entry in _agent_loop_registry.items() if entry["_target_"].startswith("verl.")
)
MANAGERS = sorted(
    name for name, cls in REWARD_MANAGER.items() if cls.__module__.startswith("verl.")
)
CASES = [{"source": source} for source in ANSWERS]
CASES += [{"source": "a dict", "manager": manager} for manager in MANAGERS]
CASES += [{"source": "a number", "agent": agent} for agent in LOOPS]
"""Names that verl itself has registered, without those of this repository's recipes and tests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


async def roll_out(folder, model, *, source, agent="single_turn_agent", manager="naive"):
    """The rows of one prompt, made by verl from the parquet file to TransferQueue; only the text is
    ours."""
    data_source, answer, truth = ANSWERS[source]
    config = compose_job(
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
        "actor_rollout_ref.rollout.prompt_length=512",
        "actor_rollout_ref.rollout.response_length=512",
        f"reward.reward_manager.name={manager}",
        "reward.num_workers=1",
    )
    row = {
        "prompt": [{"role": "user", "content": "6 x 7 = ?"}],
        "data_source": data_source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 3, "split": "train"},
        "difficulty": 0.5,
    }
    pq.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    scorer = RewardLoopWorker(config)
    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=scorer.compute_score))
    worker_class = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = worker_class(config, None, reward_loop_worker_handles=[handle])
    worker.llm_client = ScriptedServer([f"{answer}<|im_end|>"] * SESSIONS, worker.tokenizer)
    data = RLHFDataset(str(folder / "rows.parquet"), worker.tokenizer, config.data)
    prompts = collate_fn([dict(data[0])])
    prompts |= {
        "uid": np.array(["0f"], dtype=object),
        "agent_name": np.array([agent], dtype=object),
    }
    batch = tu.get_tensordict(prompts)
    tu.assign_non_tensor_data(batch, "global_steps", 1)

    await worker.generate_sequences(batch)
    await asyncio.gather(*worker.background_tasks)
    tags = queue_content()
    assert tags.pop("0f") == {"status": "finished"}, "a session has failed"
    assert len(tags) == SESSIONS
    return KVBatchMeta(
        keys=list(tags), tags=list(tags.values()), partition_id=PARTITION, extra_info={}
    )


def assert_padded(batch):
    """Pads have each field of the rows, and an update reads both together; gives a row and a
    pad."""
    padded = upsample(batch, plan_for(batch, dp_size=2), PadTemplate(eos_token_id=3, length=2))
    assert padded.pads.keys
    (row,), (pad,) = (
        read_rows(batch.keys[:1], PARTITION),
        read_rows(padded.pads.keys[:1], PARTITION),
    )
    assert pad.keys() - COLUMN_DTYPES.keys() == row.keys() - COLUMN_DTYPES.keys()
    call = padded.worker_batch("actor", batch)
    data = tq.kv_batch_get(keys=call.keys, partition_id=PARTITION)
    assert data[IS_PADDING].any()
    assert set(data.keys()) >= row.keys()
    return row, pad


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_rows_of_verls_data_loops_managers_and_reward_functions_are_padded(case, model, tmp_path):
    row, pad = assert_padded(asyncio.run(roll_out(tmp_path, model, **case)))
    assert row["rm_scores"].sum() > 0, "the answer was not taken for right"
    assert row["extra_fields"]["reward_extra_info"]
    assert row["num_turns"] == 2
    assert pad["extra_fields"] == pad["reward_model"] == {}
    assert pad["dummy_tensor"].tolist() == [0]
    assert (pad["num_turns"], pad["raw_prompt"], pad["difficulty"]) == (0, [], 0.0)
