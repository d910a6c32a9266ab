"""Rows after an update, made by hand."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from tests.support.losses_on_rows import nested
from verl_padding.driver.trained_rows import TrainedRows


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


def trained_rows(rows: Mapping[str, MadeRow]) -> TrainedRows:
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
    lengths = list(map(len, ids))
    return TrainedRows.of_fields(
        list(rows),
        lengths,
        masks,
        TensorDict(fields, len(rows)),
        weights_step_R=[row.made_by for row in rows.values()],
    )
