"""Plans for 64 ranks through verl's own dispatch: each rank gets its cells in order, and answers find their rows."""

import random

import pytest
import ray
import torch
import transfer_queue as tq
import verl.utils.transferqueue_utils as bridge
from tensordict import TensorDict
from transfer_queue import BatchMeta, KVBatchMeta

from tests.support.padded_rows import plan_for, upsample
from tests.support.ranks_in_process import ANSWER, SHAPES, RanksInProcess
from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.columns import IS_PADDING, read_column
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip
from verl_padding.plan import Job, Layout, Pass, Rows, Update, plan_batch

PROMPTS, MINI, SESSIONS = 64, 16, 4
DP_SIZES = {shape: dp_size for shape, (dp_size, *_) in SHAPES.items()}


class QueueInMemory:
    """What verl asks a client of TransferQueue during a worker call; keys and indexes are in no common order."""

    def __init__(self, keys):
        indexes = random.Random(1).sample(range(10 * len(keys)), len(keys))
        self.index_of = dict(zip(keys, indexes, strict=True))
        self.key_of = {index: key for key, index in self.index_of.items()}
        self.number_of = {index: number for number, index in enumerate(indexes)}
        self.answers = {}

    async def async_kv_retrieve_meta(self, keys, partition_id, create):
        field = {"dtype": torch.int64, "shape": (1,), "is_nested": False, "is_non_tensor": False}
        return BatchMeta(
            [self.index_of[key] for key in keys],
            [partition_id] * len(keys),
            field_schema={"number": field},
            production_status=[1] * len(keys),
        )

    async def async_kv_retrieve_keys(self, global_indexes, partition_id):
        return [self.key_of[index] for index in global_indexes]

    async def async_get_data(self, meta):
        numbers = torch.tensor([self.number_of[index] for index in meta.global_indexes])
        return TensorDict({"number": numbers}, batch_size=len(numbers))

    async def async_put(self, data, metadata):
        self.answers |= dict(zip(metadata.global_indexes, data[ANSWER].tolist(), strict=True))
        return metadata.add_fields(data)


def numbers(data):
    return data["number"].tolist()


def drawn_rows(n_prompts, seed):
    draw = random.Random(seed)
    keys = [
        f"p{prompt}_{session}_{row}"
        for prompt in range(n_prompts)
        for session in range(SESSIONS)
        for row in range(draw.randint(1, 4))
    ]
    return Rows.from_keys(keys, [int(draw.lognormvariate(6, 1)) % 4000 + 8 for _ in keys])


def plan_64(shape, strategy, packer, n_prompts, seed):
    call = {"dp_size": DP_SIZES[shape], "token_budget": 8192}
    job = Job(
        strategy=strategy,
        prompts=PROMPTS,
        sessions_per_prompt=SESSIONS,
        updates={"actor": Update(**call, prompts_per_mini_batch=MINI)},
        inference={"log_prob": Pass(**call)},
        packer=packer,
        row_multiple=DP_SIZES[shape],
    )
    return plan_batch(drawn_rows(n_prompts, seed), job)


def call_of(layout: Layout, n_pads: int, **extra_info) -> tuple[KVBatchMeta, QueueInMemory]:
    keys = [f"row{number}" for number in range(layout.n_rows + n_pads)]
    ordered = [keys[number] for number in layout.order]
    tags = [{} for _ in ordered]
    return KVBatchMeta(
        keys=ordered, tags=tags, partition_id=PARTITION, fields=None, extra_info=extra_info
    ), QueueInMemory(keys)


@pytest.fixture
def no_ray(monkeypatch):
    """verl's dispatch puts each rank's share into Ray's store and gets it out again."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(bridge, "TQ_INITIALIZED", True)
    return lambda queue: monkeypatch.setattr(tq, "get_client", lambda: queue)


@pytest.mark.parametrize(
    ("strategy", "packer", "n_prompts"),
    [("prompt", "plan", PROMPTS), ("rows", "verl", PROMPTS), ("lcm", "verl", PROMPTS), ("prompt", "verl", 3)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_gets_the_plans_cells_in_order_and_answers_find_their_rows(
    shape, strategy, packer, n_prompts, no_ray
):
    plan = plan_64(shape, strategy, packer, n_prompts, seed=n_prompts)
    assert plan.n_pads > 0
    ranks = RanksInProcess.of_shape(shape, numbers)

    layout = plan.layouts["log_prob"]
    rows, queue = call_of(layout, plan.n_pads)
    no_ray(queue)
    output = ranks.compute_log_prob(rows)
    for worker, dp_rank in zip(ranks.workers, ranks.dp_ranks(), strict=True):
        assert worker.passes == [list(layout.cells[0][dp_rank])]
    assert output.keys == rows.keys
    assert queue.answers == {queue.index_of[key]: int(key.removeprefix("row")) for key in rows.keys}

    layout = plan.layouts["actor"]
    rows, queue = call_of(
        layout,
        plan.n_pads,
        num_mini_batch=layout.n_mini_batches,
        dataloader_kwargs={"shuffle": False},
        epochs=2,
    )
    no_ray(queue)
    ranks.update_actor(rows)
    for worker, dp_rank in zip(ranks.workers, ranks.dp_ranks(), strict=True):
        assert worker.mini_batches == [list(cells[dp_rank]) for cells in layout.cells] * 2


@pytest.mark.ray
@pytest.mark.usefixtures("transfer_queue")
@pytest.mark.parametrize("shape", SHAPES)
def test_so_they_do_with_pads_in_the_real_queue_behind_the_trainers_stand_in(shape):
    lengths = [(3 + number, 1 + number % 5) for number in range(70)]
    batch = put_rows(lengths)
    batch.fields = ["prompts"]
    plan = plan_for(batch, dp_size=DP_SIZES[shape], mini=9)
    ranks = RanksInProcess.of_shape(shape, numbers_or_pad)
    try:
        padded = upsample(batch, plan, PadTemplate(eos_token_id=3, length=2))
        group = PaddedWorkerGroup(ranks, lambda: padded)
        output = group.compute_log_prob(batch)
        assert output.keys == batch.keys
        answers = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[ANSWER])[ANSWER]
        assert answers.tolist() == list(range(70))
        batch.extra_info = {"epochs": 1, "mini_batch_size": 7}
        group.update_actor(batch)
        layouts = plan.layouts
        assert layouts["actor"].n_pads > 0
        for worker, dp_rank in zip(ranks.workers, ranks.dp_ranks(), strict=True):
            for name, got in (("log_prob", worker.passes), ("actor", worker.mini_batches)):
                cells = [ranks_of[dp_rank] for ranks_of in layouts[name].cells]
                assert got == [[row if row < 70 else None for row in cell] for cell in cells]
        strip(padded.pads)
    finally:
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)


def numbers_or_pad(data):
    """The number of each row, by the length of its prompt; None for a pad."""
    pads = read_column(data, IS_PADDING).tolist()
    lengths = [len(prompt) - 3 for prompt in data["prompts"].unbind()]
    return [None if is_pad else length for is_pad, length in zip(pads, lengths, strict=True)]
