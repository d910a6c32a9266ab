"""What a row costs a rank, by its length.

Costs are whole numbers: sums of them do not depend on the order of addition, so neither does a
plan.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
CostModel = Callable[[Int64s], Int64s]
Whole = TypeVar("Whole", int, Int64s)


def up_to_multiple(number: Whole, multiple: int) -> Whole:
    """The least multiple that is no smaller."""
    return -(-number // multiple) * multiple


def token_cost(tokens_R: Int64s) -> Int64s:
    """One per token, for short rows, whose attention costs little beside the linear layers."""
    return tokens_R.astype(np.int64)


def attention_cost(tokens_R: Int64s) -> Int64s:
    """``24576 L + L^2``, as verl's ``calculate_workload`` (verl/utils/seqlen_balancing.py) has it.

    A dense layer takes 24 h^2 L operations in its linear parts and 4 h L^2 in its attention, a
    ratio of 6 h to 1 per token and token of context; h = 4096, a 7B model, gives 24576.
    """
    tokens_R = tokens_R.astype(np.int64)
    return 24576 * tokens_R + tokens_R**2


COST_MODELS: Mapping[str, CostModel] = {"tokens": token_cost, "attention": attention_cost}
"""Cost models by the name that a job gives."""
