"""Batches in TransferQueue with all that an update of actor or critic reads."""

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from tests.support.branching_rows import branching_rows
from tests.support.rows_in_queue import PARTITION, put_columns, put_rows
from tests.support.sessions_that_grow import put_grown_sessions

LENGTHS = [
    (9, 5),
    (14, 2),
    (4, 12),
    (6, 1),
    (20, 9),
    (8, 8),
    (5, 3),
    (11, 4),
    (3, 3),
    (17, 6),
    (6, 2),
]


def put_trained_rows():
    """Rows with all that an update of actor or critic reads."""
    torch.manual_seed(0)
    return with_trained_fields(put_rows(LENGTHS))


def put_few_rows():
    """Rows of three prompts, of which the first two have one row: too few for all ranks of a
    mini-batch each."""
    torch.manual_seed(0)
    return with_trained_fields(put_rows(LENGTHS[:5], ["a_0_0", "b_0_0", "c_0_0", "c_0_1", "c_1_0"]))


def put_full_rows():
    """Rows of which some fill a rank's micro-batch, so that no pad fits beside them."""
    torch.manual_seed(0)
    lengths = {
        "a_0_0": (16, 16),
        "a_0_1": (3, 3),
        "a_0_2": (2, 4),
        "b_0_0": (4, 4),
        "c_0_0": (10, 22),
        "d_0_0": (3, 5),
    }
    lengths |= {"d_0_1": (2, 2), "e_0_0": (5, 6), "f_0_0": (7, 8), "f_0_1": (3, 3)}
    return with_trained_fields(put_rows([*lengths.values()], [*lengths]))


def put_branching_rows():
    """Rows that begin alike and part, in a session and between those of a prompt."""
    torch.manual_seed(0)
    rows = branching_rows(prompts=6, rollouts=3, turns=(2, 1), system=0)
    rows.popitem()  # an odd number
    return with_trained_fields(put_grown_sessions(rows))


def with_trained_fields(batch):
    """Puts what trainer and workers add to rows before an update."""
    generator = torch.Generator().manual_seed(0)

    def column(scale, shift):
        return [
            torch.randn(tag["response_len"], generator=generator) * scale + shift
            for tag in batch.tags
        ]

    return put_columns(
        batch,
        old_log_probs=column(0.1, -5.6),
        ref_log_prob=column(0.1, -5.6),
        advantages=column(1.0, 0.2),
        values=column(0.1, 0.0),
        returns=column(1.0, 0.5),
    )


WEIGHTS = [1, 3, 2, 1, 1, 2, 0, 1, 3, 1, 2]


def put_copies(batch):
    """Puts each row as often as it weighs: all copies, and their keys by that of the row."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    rows = [row for row, weight in enumerate(WEIGHTS) for _ in range(weight)]
    keys = [f"{batch.keys[row]}{copy}" for copy, row in enumerate(rows)]
    tags = [batch.tags[row] for row in rows]
    tq.kv_batch_put(
        keys=keys, partition_id=PARTITION, fields=tu.index_select_tensor_dict(data, rows), tags=tags
    )
    copies = KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION, fields=None, extra_info={})
    return copies, {
        key: [copy for copy, of in zip(keys, rows, strict=True) if of == row]
        for row, key in enumerate(batch.keys)
    }


def put_weights(batch):
    weights = TensorDict(
        {"loss_weight": torch.tensor(WEIGHTS, dtype=torch.float32)}, batch_size=len(batch)
    )
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=weights)
