"""A mini-batch is ppo_mini_batch_size prompts, with all their rows."""

from verl_padding.plan.calls import StepShape
from verl_padding.plan.mini_batches import MiniBatches, even_groups, ordered, rows_of_prompts
from verl_padding.plan.rows import Rows
from verl_padding.plan.strategies.strategy import Strategy


class Prompt(Strategy):
    """Numbers of prompts differ by at most one, numbers of rows by at most the largest prompt's."""

    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        update = shape.updates[name]
        steps = shape.optimizer_steps(update)
        rows_P = ordered(rows_of_prompts(rows), update, shape.seed)
        groups = even_groups([len(group) for group in rows_P], min(steps, len(rows_P)))
        rows_M = [[row for prompt in prompts for row in rows_P[prompt]] for prompts in groups]
        why = f"each step needs a prompt and only {len(rows_P)} of {shape.prompts} arrived"
        warning = f"{name}: only {len(groups)} of {steps} optimizer steps, because {why}"
        return MiniBatches(rows_M=rows_M, warning=warning if len(groups) < steps else None)
