"""What rows share is shared only where that takes no longer than sharing less."""

from dataclasses import replace

from hypothesis import given, settings

from tests.support.drawn_jobs import batches, jobs
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.forest import Forest
from verl_padding.plan.mini_batch_costs import layout_time
from verl_padding.plan.planner import costs_of, reuses_layout_of


def times(rows: Rows, job: Job) -> dict[str, int]:
    """What each call takes that has a layout of its own, by the plan's own cost."""
    layouts = plan_batch(rows, job).layouts
    own = {name: call for name, call in job.calls() if reuses_layout_of(job, call) is None}
    return {
        name: layout_time(layouts[name], costs_of(rows, job, call)) for name, call in own.items()
    }


@settings(max_examples=200)
@given(rows=batches(max_prompts=4, max_rows=6), job=jobs(pass_cut_as_update=True, sharing="on"))
def test_no_call_takes_longer_than_with_whole_rows_or_without_sharing(rows, job):
    less = replace(job, may_branch=False), replace(job, sharing="off")
    branches, whole, off = (times(rows, each) for each in (job, *less))
    assert whole == times(replace(rows, forest=rows.forest and rows.forest.whole_beginnings()), job)
    for name, time in branches.items():
        assert time <= whole[name] <= off[name]


def test_rows_that_part_take_no_less_of_the_budget_than_is_said():
    # 64 rollouts of ten tokens, of one prompt of a hundred: all fit into one micro-batch.
    keys = [f"a_{session}_0" for session in range(64)]
    forest = Forest.in_order([110] * 64, range(64), [0, *[100] * 63])
    rows = Rows.from_keys(keys, [110] * 64, forest=forest)
    for min_branch_tokens, most in ((0, 64), (128, 16)):
        update = Update(
            dp_size=1,
            token_budget=2048,
            prompts_per_mini_batch=1,
            min_branch_tokens=min_branch_tokens,
        )
        job = Job(
            strategy="prompt",
            prompts=1,
            sessions_per_prompt=64,
            updates={"actor": update},
            inference={},
            packer="plan",
            sharing="on",
        )
        layout = plan_batch(rows, job).layouts["actor"]
        assert max(len(held) for held in layout.micro_batches(0, 0)) == most


def test_the_lower_bound_of_rows_that_part_is_one_where_short_ends_of_long_rows_cost_most_a_token():
    # A row of 150, and eight of about 85 whose first 79 are the same, beside eight of 15 alone;
    # thousands of tokens.
    tokens = [thousands * 1000 for thousands in (150, 80, *[89] * 7, *[15] * 8)]
    keys = [
        "a_0_0",
        *[f"b_{session}_0" for session in range(8)],
        *[f"c{prompt}_0_0" for prompt in range(8)],
    ]
    forest = Forest.in_order(tokens, range(17), [0, 0, *[79_000] * 7, *[0] * 8])
    update = Update(dp_size=2, token_budget=150_010, prompts_per_mini_batch=10)
    job = Job(
        strategy="rows", prompts=10, sessions_per_prompt=1, updates={"actor": update}, inference={}
    )
    plan = plan_batch(
        Rows.from_keys(keys, tokens, forest=forest), replace(job, packer="plan", sharing="on")
    )
    assert plan.figures["actor"].sharing_factor > 2
    assert plan.figures["actor"].micro_over_lower_bound >= 1
