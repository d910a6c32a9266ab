"""Weights that rows in the real TransferQueue bring along: read, checked, and carried to the workers as factors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transfer_queue as tq

from tests.support.padded_rows import plan_for
from tests.support.rows_in_queue import PARTITION, put_rows, put_some_fields, queue_content
from verl_padding.errors import PaddingDataError
from verl_padding.pads.columns import IS_PADDING, LOSS_FACTOR, WEIGHS_ROWS
from verl_padding.pads.loss_weighting import LossWeighting
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.queue import read_rows
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

TEMPLATE = PadTemplate(eos_token_id=3, length=4)
LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9)]
BY_ROWS = LossWeighting(call="actor", mode="seq-mean-token-mean")


def sent(batch, *loss_weightings) -> tuple[dict[str, float], list[float], object]:
    """Factor of each real row, those of the pads, and all that an update sends; none if the loss is to read none."""
    padded = PaddedBatch(batch, plan_for(batch, mini=3), TEMPLATE, loss_weightings=loss_weightings)
    padded.put_pads()
    rows = padded.update_call("actor", batch)
    data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION)
    strip(padded.pads)
    assert data[IS_PADDING].any()
    if not rows.extra_info.get(WEIGHS_ROWS):
        return {}, [], data
    factors = dict(zip(rows.keys, data[LOSS_FACTOR].tolist(), strict=True))
    real = {key: factors[key] for key in batch.keys}
    return real, [factor for key, factor in factors.items() if key not in real], data


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32], ids=["float", "tensor", "numpy"])
def test_the_weights_of_an_agent_loop_reach_the_loss(kind):
    batch = put_rows(LENGTHS, loss_weight=[kind(weight) for weight in (2.0, 0.5, 0.0, 1.0, 1.5)])
    real, pads, data = sent(batch, BY_ROWS)
    assert list(real.values()) == [2.0, 0.5, 0.0, 1.0, 1.5]  # they add up to the rows: nothing is left to level
    assert set(pads) == {0.0}
    assert {float(weight) for weight, pad in zip(data["loss_weight"], data[IS_PADDING], strict=True) if pad} == {0.0}


def test_an_update_does_not_read_the_factors_of_an_earlier_one():
    batch = put_some_fields(LENGTHS, [{"loss_weight": 4.0}, {}, {}, {}, {}])
    assert sent(batch, BY_ROWS)[0]
    some = batch.select_keys(batch.keys[2:])
    factors, _, data = sent(some, BY_ROWS)
    assert factors == {}
    names = {name for key in some.keys for name in read_rows([key], PARTITION)[0]}
    assert LOSS_FACTOR in names - set(data.keys()), "rows have it and pads do not: only some ranks would read it"


def test_a_weight_among_extra_fields_is_refused_before_a_pad_is_put():
    batch = put_rows(LENGTHS, extra_fields=[{"loss_weight": 2.0}] * 5)
    padded = PaddedBatch(batch, plan_for(batch, mini=3), TEMPLATE, loss_weightings=[BY_ROWS])
    content = queue_content()
    with pytest.raises(PaddingDataError, match=r"^field 'extra_fields': loss_weight=2.0 is in it, but a weight is a"):
        padded.put_pads()
    assert queue_content() == content


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "2", None, [1.0, 2.0], torch.ones(2)], ids=str)
def test_a_weight_that_is_none_is_refused_with_its_row(weight):
    batch = put_some_fields(LENGTHS, [{"loss_weight": 1.0}] * 4 + [{"loss_weight": weight}])
    content = queue_content()
    with pytest.raises(PaddingDataError, match=rf"^row '{batch.keys[4]}': loss_weight=.*: not a finite number"):
        PaddedBatch(batch, plan_for(batch, mini=3), TEMPLATE, loss_weightings=[BY_ROWS])
    assert queue_content() == content


def test_weights_are_refused_where_the_loss_cannot_weigh_rows():
    weighting = LossWeighting(call="actor", mode="token-mean", refusal="the reason")
    with pytest.raises(PaddingDataError, match=r"^field 'loss_weight': .*: the reason$"):
        sent(put_rows(LENGTHS, loss_weight=[2.0] * 5), weighting)
    assert set(sent(put_rows(LENGTHS, loss_weight=[1.0] * 5), weighting)[0].values()) == {1.0}
    batch = put_rows(LENGTHS, loss_weight=[2.0] * 5)
    warming_up = replace(plan_for(batch, mini=3), layouts={})
    with pytest.raises(PaddingDataError, match=r"^field 'loss_weight': .*: the reason$"):
        PaddedBatch(batch, warming_up, TEMPLATE, loss_weightings=[weighting])  # though it does not train that loss yet
