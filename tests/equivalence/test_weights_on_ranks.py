"""Weights on real FSDP2 ranks: a row of weight three trains them as three rows of weight one train one rank."""

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from tests.equivalence.updates import MODES, TEMPLATE, call, plan_of, put_trained_rows
from tests.support.fsdp2_workers import start_over, weights_of
from tests.support.rows_in_queue import PARTITION
from tests.support.tolerance import RELATIVE_FLOAT32
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.loss_weighting import LossWeighting
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.upsampling import strip
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

WEIGHTS = [1, 3, 2, 1, 1, 2, 0, 1, 3, 1, 2]


@pytest.fixture(scope="module", autouse=True)
def _cut_as_planned(actors) -> None:
    actors[0].execute_with_func_generator(install())


def copied(batch: KVBatchMeta) -> dict[str, list[str]]:
    """Puts each row as often as it weighs; the keys of its copies, by its own."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    copies = {key: [f"{key}{copy}" for copy in range(weight)] for key, weight in zip(batch.keys, WEIGHTS, strict=True)}
    for row, (keys, tag) in enumerate(zip(copies.values(), batch.tags, strict=True)):
        for key in keys:
            tq.kv_batch_put(
                keys=[key], partition_id=PARTITION, fields=tu.index_select_tensor_dict(data, [row]), tags=[tag]
            )
    return copies


@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_weight_three_trains_as_three_rows_do(mode, actors):
    padded_ranks, one_rank = actors
    for workers in actors:
        start_over(workers, mode)
    batch = put_trained_rows()
    copies = copied(batch)
    weights = TensorDict({"loss_weight": torch.tensor(WEIGHTS, dtype=torch.float32)}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=weights)
    plan = plan_of(batch, "plan")
    padded = PaddedBatch(batch, plan, TEMPLATE, loss_weightings=[LossWeighting(call="actor", mode=mode)])
    padded.put_pads()
    before = weights_of(padded_ranks)
    group = PaddedWorkerGroup(padded_ranks, lambda: padded)
    group.update_actor(call(batch, batch.keys, global_batch_size=7, mini_batch_size=4, epochs=1))
    strip(padded.pads)
    tags = {copy: tag for key, tag in zip(batch.keys, batch.tags, strict=True) for copy in copies[key]}
    for ranks in plan.layouts["actor"].cells:
        rows = [row for cell in ranks for row in cell if row < len(batch)]
        keys = [copy for row in rows for copy in copies[batch.keys[row]]]
        several = KVBatchMeta(keys=keys, tags=[tags[key] for key in keys], partition_id=PARTITION, fields=batch.fields)
        one_rank.update_actor(call(several, keys, global_batch_size=len(keys), mini_batch_size=len(keys), epochs=1))
    after, reference = weights_of(padded_ranks), weights_of(one_rank)
    assert (reference - before).norm() > 0.1, "the update was meant to move the weights"
    assert (after - reference).norm() <= RELATIVE_FLOAT32 * reference.norm()
