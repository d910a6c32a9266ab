"""A mini-batch is an even share of the rows, without regard to prompts."""

from verl_padding.plan.calls import StepShape
from verl_padding.plan.mini_batches import MiniBatches, cut_evenly, ordered
from verl_padding.plan.rows import Rows
from verl_padding.plan.strategies.strategy import Strategy


class EvenRows(Strategy):
    """Numbers of rows differ by at most one."""

    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        update = shape.updates[name]
        steps = shape.steps_of_batch(update, len(rows))
        return cut_evenly(ordered(range(len(rows)), update, shape.seed), steps, name)
