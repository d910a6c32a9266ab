"""Rows after an update, made by hand."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from tests.support.losses_on_rows import nested
from verl_padding.driver.batch_metrics import TrainedRows
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import uid_of_key
from verl_padding.prefix_sharing.detection import continued_rows


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
    turns: int = 1


def trained_rows(rows):
    """The rows of a local update, by their keys."""
    masks = [
        torch.tensor(list(map(int, row.mask or "1" * len(row.response)))) for row in rows.values()
    ]
    ids = [torch.tensor(list(map(ord, row.prompt + row.response))) for row in rows.values()]
    pairs = list(zip(rows.values(), masks, strict=True))
    fields = {
        "advantages": nested([row.advantage * mask.float() for row, mask in pairs]),
        "rm_scores": nested(
            [torch.tensor([0.0] * (len(mask) - 1) + [row.score]) for row, mask in pairs]
        ),
        "num_turns": torch.tensor([row.turns for row in rows.values()]),
    }
    lengths, keys = list(map(len, ids)), list(rows)
    tries = PrefixTries.from_tokens([row.numpy() for row in ids], list(map(uid_of_key, keys)))
    continued = continued_rows(tries, keys, range(len(keys)), {}, {})
    tags = [
        {"seq_len": length, "min_global_steps": row.made_by}
        for length, row in zip(lengths, rows.values(), strict=True)
    ]
    return TrainedRows.from_fields(
        KVBatchMeta(keys=keys, tags=tags),
        TensorDict(fields, len(rows)),
        masks,
        [continued.get(row) for row in range(len(keys))],
    )
