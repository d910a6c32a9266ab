"""The plan of a batch."""

from dataclasses import replace

from tests.plan.test_strategies import JOB
from verl_padding.plan import BatchPlan, Layout


def test_a_batch_has_as_many_pads_as_the_call_that_needs_most():
    # Of three rows; numbers from 3 on are pads.
    actor = Layout(n_rows=3, rows_MDK=((((0, 2), (3,)), ((1,), (4, 5))),))
    ref = Layout(n_rows=3, rows_MDK=((((0, 2),), ((1, 3),)),))
    plan = BatchPlan(job=JOB, layouts={"actor": actor, "ref": ref}, figures={})
    assert plan.n_pads == 3
    assert replace(plan, layouts={}).n_pads == 0
