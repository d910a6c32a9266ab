"""Rows after an update, made by hand."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from tests.support.losses_on_rows import nested
from verl_padding.driver.step_metrics import TrainedRows


@dataclass(frozen=True, kw_only=True)
class MadeRow:
    prompt: str = "?"
    """A letter for each token."""
    response: str = "!"
    mask: str = ""
    """A 1 or 0 for each token of the response; all are trained if it is left out."""
    score: float = 0.0
    advantage: float = 0.0
    """Of each token that is trained."""
    made_by: int | None = 0


def trained_rows(rows):
    """The rows of a local update, by their keys."""
    masks = [
        torch.tensor(list(map(int, row.mask or "1" * len(row.response)))) for row in rows.values()
    ]
    pairs = list(zip(rows.values(), masks, strict=True))
    fields = {
        "advantages": nested([row.advantage * mask.float() for row, mask in pairs]),
        "rm_scores": nested(
            [torch.tensor([0.0] * (len(mask) - 1) + [row.score]) for row, mask in pairs]
        ),
    }
    tags = [
        {"seq_len": len(row.prompt + row.response), "min_global_steps": row.made_by}
        for row in rows.values()
    ]
    batch = KVBatchMeta(keys=list(rows), tags=tags)
    return TrainedRows.from_fields(batch, TensorDict(fields, len(rows)), masks)
