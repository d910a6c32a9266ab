"""Plans which row goes to which mini-batch, rank and micro-batch, and how many pads fill them.

May import: errors.

Pure Python and NumPy: nothing of torch, Ray, verl or TransferQueue is imported here.
``docs/how_it_works.md`` says what is given, what is minimized, and how.

The letters behind the last underscore of an array's name are its axes, outermost first, here and in
the other packages: ``rows_DK[d][k]`` are the numbers of the rows of micro-batch k of rank d.

- ``R``: rows, of the batch, or of the call or micro-batch that a worker has
- ``P``, ``S``: prompts, sessions
- ``M``: mini-batches
- ``D``: data-parallel ranks
- ``K``: micro-batches of a rank
- ``B``: bins that items are shared out over: ranks, or micro-batches of whatever rank
- ``I``: items in an order of their own: some of the rows, or what is packed as one
- ``J``: runs of rows that share
- ``L``: leaves of a trie, each with its segment
- ``T``: tokens
- ``F``: fields
"""

from verl_padding.errors import PlanError
from verl_padding.plan.call_costs import LayoutFigures
from verl_padding.plan.calls import OptimizerSteps, Packer, Pass, Sharing, Update
from verl_padding.plan.cost import COST_MODELS
from verl_padding.plan.layout import Layout
from verl_padding.plan.planner import BatchPlan, plan_batch
from verl_padding.plan.rows import Rows
from verl_padding.plan.strategies import STRATEGIES, Job, padded_rows

__all__ = [
    "COST_MODELS",
    "STRATEGIES",
    "BatchPlan",
    "Job",
    "Layout",
    "LayoutFigures",
    "OptimizerSteps",
    "Packer",
    "Pass",
    "PlanError",
    "Rows",
    "Sharing",
    "Update",
    "padded_rows",
    "plan_batch",
]
