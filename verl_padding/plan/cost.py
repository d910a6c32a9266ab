"""What a row costs a rank, by its length.

Costs are whole numbers: sums of them do not depend on the order of addition, so neither does a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
CostModel = Callable[[Int64s], Int64s]


@runtime_checkable
class MicroBatchCost(Protocol):
    """A cost model by which a micro-batch costs more than its rows do alone: whichever has these beside its call.

    All others are a sum over rows.
    """

    @property
    def handling(self) -> int:
        """Cost of a micro-batch, whatever it holds."""

    @property
    def pad_handling(self) -> int:
        """Cost of a pad beside its tokens, at least."""

    @property
    def depends_on_fill(self) -> bool:
        """Whether rows cost more beside others."""

    @property
    def fill(self) -> int:
        """Tokens of the micro-batch that rows are priced for; 0 for rows alone."""

    @property
    def least_fill(self) -> int:
        """Of emptier micro-batches nothing is known."""

    @property
    def trial_fill(self) -> int:
        """Tokens of the micro-batches that a plan is to try, whatever they cost; 0 for a plan that chooses."""

    def __call__(self, tokens_R: Int64s, /) -> Int64s:
        """Cost of rows (R,), alone or in a micro-batch of ``fill`` tokens."""

    def together(self, tokens_R: Int64s, /) -> int:
        """What the rows of a micro-batch cost beside what each costs as it is priced."""

    def at(self, fill: int, /) -> MicroBatchCost:
        """The same, for rows of micro-batches that have ``fill`` tokens."""


def token_cost(tokens_R: Int64s) -> Int64s:
    """One per token: right for short rows, whose attention costs little beside the linear layers."""
    return tokens_R.astype(np.int64)


def attention_cost(tokens_R: Int64s) -> Int64s:
    """``24576 L + L^2``, as verl's ``calculate_workload`` (verl/utils/seqlen_balancing.py) has it.

    A dense layer takes 24 h^2 L operations in its linear parts and 4 h L^2 in its attention, a ratio of 6 h to 1 per
    token and token of context; h = 4096, a 7B model, gives 24576.
    """
    tokens_R = tokens_R.astype(np.int64)
    return 24576 * tokens_R + tokens_R**2


COST_MODELS: Mapping[str, CostModel] = MappingProxyType({"tokens": token_cost, "attention": attention_cost})
"""Cost models by the name that a job gives."""
