"""A mini-batch is an even share of the rows, without regard to prompts."""

from __future__ import annotations

from verl_padding.plan.mini_batches import MiniBatches, check_prompts_divide, cut_evenly, ordered
from verl_padding.plan.rows import Rows
from verl_padding.plan.step_shape import StepShape
from verl_padding.plan.strategies.strategy import Strategy


class EvenRows(Strategy):
    """Numbers of rows differ by at most one."""

    def check(self, shape: StepShape, name: str) -> None:
        check_prompts_divide(shape, name)

    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        update = shape.updates[name]
        order = ordered(range(len(rows)), update, shape.seed)
        return cut_evenly(order, shape.optimizer_steps(update), name)
