"""Plans which row goes to which mini-batch and rank, and how many pads fill each cell.

Pure Python and NumPy: nothing of torch, Ray, verl or TransferQueue is imported here.
"""

from verl_padding.plan.batch_plan import BatchPlan, LayoutFigures
from verl_padding.plan.cost import COST_MODELS
from verl_padding.plan.errors import NoRealRowError, PlanError, RowTooLongError
from verl_padding.plan.job import Job, Packer, Pass, Strategy, Update
from verl_padding.plan.layout import Layout
from verl_padding.plan.planner import plan_batch
from verl_padding.plan.rows import MOST_TOKENS, Rows
from verl_padding.plan.transformer_cost import TransformerCost

__all__ = [
    "COST_MODELS",
    "MOST_TOKENS",
    "BatchPlan",
    "Job",
    "Layout",
    "LayoutFigures",
    "NoRealRowError",
    "Packer",
    "Pass",
    "PlanError",
    "RowTooLongError",
    "Rows",
    "Strategy",
    "TransformerCost",
    "Update",
    "plan_batch",
]
