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

from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import PARTITION, queue_content
from tests.support.verl_config import compose_job
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.pads.columns import COLUMN_DTYPES, IS_PADDING
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


def verls(registry):
    """Names that verl itself has registered, without those of this repository's recipes and
    tests."""
    return sorted(
        name for name, entry in registry.items() if entry.get("_target_", "").startswith("verl.")
    )


def agent_loops():
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    return verls(_agent_loop_registry)


def reward_managers():
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    return sorted(
        name for name, cls in REWARD_MANAGER.items() if cls.__module__.startswith("verl.")
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def roll_out(tmp_path, model):
    """Gives the rows of one prompt, made by verl from the parquet file to TransferQueue; only the
    text is ours."""
    return lambda **choices: asyncio.run(_roll_out(tmp_path, model, **choices))


class Policy:
    """The model's side of an agent loop: it knows the answer."""

    def __init__(self, tokenizer, answer):
        self.token_ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]

    async def generate(self, request_id, **_):
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(
            token_ids=self.token_ids,
            log_probs=[-0.5] * len(self.token_ids),
            stop_reason="completed",
            extra_fields={"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1},
        )


async def _roll_out(folder, model, *, source, agent="single_turn_agent", manager="naive"):
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

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
    worker.llm_client = Policy(worker.tokenizer, answer)
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
    call = padded.update_rows("actor", batch)
    data = tq.kv_batch_get(keys=call.keys, partition_id=PARTITION)
    assert data[IS_PADDING].any()
    assert set(data.keys()) >= row.keys()
    return row, pad


CASES = [{"source": source} for source in ANSWERS]
CASES += [{"source": "a dict", "manager": manager} for manager in reward_managers()]
CASES += [{"source": "a number", "agent": agent} for agent in agent_loops()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_rows_of_verls_data_loops_managers_and_reward_functions_are_padded(case, roll_out):
    row, pad = assert_padded(roll_out(**case))
    assert row["rm_scores"].sum() > 0, "the answer was not taken for right"
    assert row["extra_fields"]["reward_extra_info"]
    assert row["num_turns"] == 2
    assert pad["extra_fields"] == pad["reward_model"] == {}
    assert pad["dummy_tensor"].tolist() == [0]
    assert (pad["num_turns"], pad["raw_prompt"], pad["difficulty"]) == (0, [], 0.0)
