"""The rows of a local update, after it: what they earned, and what they were trained on.

They are read once, for the step's metrics and for its record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.plan.cost import Int64s

ADVANTAGES, SCORES, TURNS = FIELDS = "advantages", "rm_scores", "num_turns"
"""Fields of verl's rows that are read, beside their token ids."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """Columns of the rows of a batch, in its order."""

    keys: Sequence[str]
    tokens_R: Int64s
    """Tokens of prompt and response."""
    response_R: Int64s
    """Tokens of the response."""
    trained_R: Int64s
    """Tokens that are trained."""
    advantage_R: Floats
    """Mean over these; NaN where there are none."""
    has_advantage_R: npt.NDArray[np.bool_]
    """Whether the advantage of one of these is not exactly 0."""
    reward_R: Floats
    """Score, summed over the tokens."""
    turns_R: Floats
    """Turns of the conversation."""
    continued_R: Sequence[int | None]
    """Number of the row of its session that each continues; None for none."""
    weights_step_R: Sequence[int | None]
    """Global step that has made the oldest weights that sampled each row."""

    @classmethod
    def from_fields(
        cls,
        batch: KVBatchMeta,
        fields: TensorDict,
        mask_R: Sequence[torch.Tensor],
        continued_R: Sequence[int | None],
    ) -> Self:
        """What the :data:`FIELDS` of a batch's rows say; ``mask_R``, (response,) each, says which
        tokens are trained, and ``continued_R`` which row each continues."""
        lengths = torch.tensor([len(mask) for mask in mask_R])

        def per_row(values: torch.Tensor) -> Floats:
            summed: Floats = torch.segment_reduce(
                values.to(torch.float64), "sum", lengths=lengths
            ).numpy()
            return summed

        # All rows behind each other: per_row sums the tokens of each.
        trained = torch.cat(list(mask_R)).bool()
        advantages = torch.cat(fields[ADVANTAGES].unbind()) * trained
        trained_R = per_row(trained).astype(np.int64)
        with np.errstate(invalid="ignore"):
            advantage_R = per_row(advantages) / trained_R
        return cls(
            keys=batch.keys,
            tokens_R=np.array(tokens_of_tags(batch.keys, batch.tags), dtype=np.int64),
            response_R=lengths.numpy(),
            trained_R=trained_R,
            advantage_R=advantage_R,
            has_advantage_R=per_row(advantages != 0) > 0,
            reward_R=per_row(torch.cat(fields[SCORES].unbind())),
            turns_R=np.array([float(turns) for turns in fields[TURNS]]),
            continued_R=continued_R,
            weights_step_R=[tag.get("min_global_steps") for tag in batch.tags],
        )
