"""Pads come and go in the real TransferQueue, and only worker calls see them."""

import numpy as np
import pytest
import torch
import transfer_queue as tq

from tests.support.padded_rows import DEFAULT_WEIGHTING, plan_for, upsample
from tests.support.rows_in_queue import (
    PARTITION,
    put_columns,
    put_rows,
    queue_content,
)
from verl_padding.errors import PaddingDataError
from verl_padding.pads.loss_weighting import LossWeighting
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.planned_call import BATCH_ROW, CALL, IS_PADDING
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

TEMPLATE = PadTemplate(eos_token_id=3, length=4)


def test_an_update_carries_the_mini_batch_of_each_row():
    batch = put_rows([(5, 3), (7, 2), (4, 9), (6, 1), (20, 9)])
    batch.extra_info.update(mini_batch_size=4, epochs=2, dataloader_kwargs={"shuffle": True})
    padded = upsample(batch, plan_for(batch), TEMPLATE)
    # What the trainer adds once the pads are there.
    put_columns(batch, returns=[torch.ones(n) for n in (3, 2, 9, 1, 9)])
    rows = padded.worker_batch("actor", batch)
    layout = padded.plan.layouts["actor"]
    assert layout.n_mini_batches == 3
    assert "mini_batch_size" not in rows.extra_info
    assert rows.extra_info["epochs"] == 2
    steps = list(rows.extra_info[CALL].mini_batches)
    assert [step.local_batches for step in steps] == [*layout.local_batches] * 2
    assert batch.extra_info["mini_batch_size"] == 4
    data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION)
    # What verl's workers make of it: equal chunks a rank, and mini-batches as the batch_sampler
    # says.
    sampler = rows.extra_info["dataloader_kwargs"]["batch_sampler"]
    size = len(data) // layout.dp_size
    assert (
        [place for places in sampler for place in places]
        == list(range(size))
        == list(range(rows.extra_info["num_mini_batch"]))
    )
    for step, places in zip(steps[: len(sampler)], sampler, strict=True):
        held_D = [[rank * size + place for place in places] for rank in range(layout.dp_size)]
        real_D = [[place for place in held if not data[IS_PADDING][place]] for held in held_D]
        assert step.local_batches == tuple(tuple(data[BATCH_ROW][held].tolist()) for held in held_D)
        assert step.rows_with_loss == step.trained_rows == sum(map(len, real_D)) >= 1
        assert step.reporting_ranks == sum(map(bool, real_D))
    assert data[IS_PADDING].any()
    assert "returns" in data, "ranks with a pad lack what pads lack"
    assert rows.extra_info[CALL].factor_R is None, "all rows weigh the same"


def test_a_batch_that_is_reordered_after_the_plan_keeps_what_was_planned():
    weights = [2.0, 0.5, 3.0, 1.0, 1.5]
    batch = put_rows([(5, 3), (7, 2), (4, 9), (6, 1), (20, 9)], loss_weight=weights)
    weighting, plan = LossWeighting(mode="token-sum"), plan_for(batch, mini=2)
    padded = PaddedBatch(batch, plan, TEMPLATE, weighting=weighting)
    weight_of = dict(zip(batch.keys, weights, strict=True))
    padded.put_pads()
    read = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        batch.reorder(order)
        rows = padded.worker_batch("actor", batch)
        data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION)
        told = rows.extra_info[CALL]
        read.append((rows.keys, data[BATCH_ROW].tolist(), list(told.mini_batches)))
        for key, number in zip(rows.keys, data[BATCH_ROW].tolist(), strict=True):
            assert key == [*padded.batch.keys, *padded.pads.keys][number]
            assert number >= 5 or told.factor_R[number] == weight_of[key]
    assert read[0] == read[1]
    assert len({step.trained_tokens for step in told.mini_batches}) == 2, "meant to differ"


WEIGHED_LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9)]


def sent(batch, weighting=DEFAULT_WEIGHTING):
    """Factor of each real row, none if the loss is to read none; and all that an update sends."""
    padded = upsample(batch, plan_for(batch, mini=3), TEMPLATE, weighting)
    rows = padded.worker_batch("actor", batch)
    data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION)
    strip(padded.pads)
    assert data[IS_PADDING].any()
    factor_R = rows.extra_info[CALL].factor_R
    return dict(zip(batch.keys, factor_R, strict=True)) if factor_R else {}, data


@pytest.mark.parametrize(
    "kind", [float, torch.tensor, np.float32], ids=["float", "tensor", "numpy"]
)
def test_the_weights_of_an_agent_loop_reach_the_loss(kind):
    batch = put_rows(
        WEIGHED_LENGTHS, loss_weight=[kind(weight) for weight in (2.0, 0.5, 0.0, 1.0, 1.5)]
    )
    real, data = sent(batch, DEFAULT_WEIGHTING)
    assert list(real.values()) == [
        2.0,
        0.5,
        0.0,
        1.0,
        1.5,
    ]  # they add up to the rows: nothing is left to level
    assert {
        float(weight)
        for weight, pad in zip(data["loss_weight"], data[IS_PADDING], strict=True)
        if pad
    } == {0.0}


def test_a_weight_among_extra_fields_is_refused_before_a_pad_is_put():
    batch = put_rows(WEIGHED_LENGTHS, extra_fields=[{"loss_weight": 2.0}] * 5)
    padded = PaddedBatch(batch, plan_for(batch, mini=3), TEMPLATE, weighting=DEFAULT_WEIGHTING)
    content = queue_content()
    with pytest.raises(
        PaddingDataError,
        match=r"^field 'extra_fields': loss_weight=2.0 is in it, but a weight is a",
    ):
        padded.put_pads()
    assert queue_content() == content


def test_weights_are_refused_where_the_loss_cannot_weigh_rows():
    weighting = LossWeighting(mode="token-mean", refusal="the reason")
    with pytest.raises(PaddingDataError, match=r"^field 'loss_weight': .*: the reason$"):
        sent(put_rows(WEIGHED_LENGTHS, loss_weight=[2.0] * 5), weighting)
    assert set(sent(put_rows(WEIGHED_LENGTHS, loss_weight=[1.0] * 5), weighting)[0].values()) == {
        1.0
    }
