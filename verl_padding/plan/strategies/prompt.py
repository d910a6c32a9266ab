"""A mini-batch is an even share of the prompts, with all their rows."""

from verl_padding.plan.calls import StepShape
from verl_padding.plan.mini_batches import MiniBatches, even_groups, ordered, rows_of_prompts
from verl_padding.plan.rows import Rows
from verl_padding.plan.strategies.strategy import Strategy


class Prompt(Strategy):
    """Numbers of prompts differ by at most one, numbers of rows by at most the largest prompt's."""

    def cut(self, rows: Rows, shape: StepShape, name: str) -> MiniBatches:
        update = shape.updates[name]
        steps = shape.steps_of_batch(update, len(rows))
        rows_P = ordered(rows_of_prompts(rows), update, shape.seed)
        groups = even_groups([len(group) for group in rows_P], min(steps, len(rows_P)))
        rows_M = [[row for prompt in prompts for row in rows_P[prompt]] for prompts in groups]
        warning = None
        # By rows, it is the rule that prompts of many rows take a step each, and no more.
        if len(groups) < steps and shape.optimizer_steps == "configured":
            why = f"each step needs a prompt and only {len(rows_P)} of {shape.prompts} arrived"
            warning = f"{name}: only {len(groups)} of {steps} optimizer steps, because {why}"
        return MiniBatches(rows_M=rows_M, warning=warning)
