"""A mini-batch is ppo_mini_batch_size prompts, with all their rows."""

from __future__ import annotations

from verl_padding.plan.even_cuts import even_groups
from verl_padding.plan.mini_batches import MiniBatches, check_prompts_divide, ordered, rows_of_prompts
from verl_padding.plan.rows import Rows
from verl_padding.plan.step_shape import StepShape
from verl_padding.plan.strategies.strategy import Strategy


class Prompt(Strategy):
    """Numbers of prompts differ by at most one, numbers of rows by at most the largest prompt's."""

    def check(self, shape: StepShape, name: str) -> None:
        check_prompts_divide(shape, name)

    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        update = shape.updates[name]
        steps = shape.optimizer_steps(update)
        rows_P = ordered(rows_of_prompts(rows), update, shape.seed)
        n_groups = min(steps, len(rows_P))
        groups = even_groups([len(group) for group in rows_P], n_groups)
        rows_M = [[row for prompt in prompts for row in rows_P[prompt]] for prompts in groups]
        warning = None
        if n_groups < steps:
            warning = (
                f"{name}: only {n_groups} of {steps} optimizer steps, because each step needs a prompt and only "
                f"{len(rows_P)} of {shape.prompts} arrived"
            )
        return MiniBatches(rows_M=rows_M, warning=warning)
