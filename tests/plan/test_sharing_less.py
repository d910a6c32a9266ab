"""What rows share is shared only where that takes no longer than sharing less."""

from dataclasses import replace

from hypothesis import given, settings

from tests.support.drawn_jobs import batches, jobs
from verl_padding.plan import Job, Rows, plan_batch
from verl_padding.plan.mini_batch_costs import layout_time
from verl_padding.plan.planner import costs_of, reuses_layout_of


def times(rows: Rows, job: Job) -> dict[str, int]:
    """What each call takes that has a layout of its own, by the plan's own cost."""
    layouts = plan_batch(rows, job).layouts
    own = {name: call for name, call in job.calls() if reuses_layout_of(job, call) is None}
    return {name: layout_time(layouts[name], costs_of(rows, job, call)) for name, call in own.items()}


@settings(max_examples=200)
@given(rows=batches(max_prompts=4, max_rows=6), job=jobs(pass_cut_as_update=True, sharing="trees"))
def test_no_call_takes_longer_than_with_chains_or_without_sharing(rows, job):
    trees, chains, off = (times(rows, replace(job, sharing=sharing)) for sharing in ("trees", "chains", "off"))
    for name, time in trees.items():
        assert time <= chains[name] <= off[name]
