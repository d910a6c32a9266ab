"""Single cases of the planner: figures that are known, and everything it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.jobs import five_jobs
from verl_padding.plan import (
    Job,
    Layout,
    NoRealRowError,
    Pass,
    PlanError,
    Rows,
    RowTooLongError,
    Update,
    plan_batch,
)
from verl_padding.plan.planner import reuses_layout_of


def batch(tokens):
    """A prompt for each row."""
    return Rows.from_keys([f"p{i}_0_0" for i in range(len(tokens))], tokens)


def job_of(
    strategy="prompt", *, prompts=1, sessions=1, inference=None, packer="verl", seed=0, **updates
):
    return Job(
        strategy=strategy,
        prompts=prompts,
        sessions_per_prompt=sessions,
        updates=updates,
        inference=inference or {},
        packer=packer,
        seed=seed,
    )


def lcm_job(dp_size=1, **mini_batches):
    updates = {
        name: Update(dp_size=dp_size, prompts_per_mini_batch=size)
        for name, size in mini_batches.items()
    }
    return job_of("lcm", **updates)


def test_the_order_deals_rank_by_rank_and_mini_batch_by_mini_batch():
    # Two mini-batches, two ranks, cells of two rows and of one. Row 5 is pad 0 of 5 rows.
    layout = Layout(n_rows=5, cells=(((0, 1), (2, 5)), ((3,), (4,))))
    assert layout.order == (0, 1, 3, 2, 5, 4)
    assert layout.cell_rows_M == (2, 1)
    assert layout.real_rows_M == (3, 2)
    assert layout.reporting_ranks_M == (2, 2)
    assert layout.n_pads == 1


def test_a_pass_has_the_updates_micro_batches_and_then_other_rows():
    update = Layout(
        n_rows=6,
        cells=(((0, 1), (2, 6)), ((3,), (7,))),
        micro_batch_rows=(((2,), (2,)), ((1,), (1,))),
        left_out=((4, 5), ()),
    )
    taken = update.flatten_for_pass()
    assert [taken.micro_batches(0, rank) for rank in (0, 1)] == [[(0, 1), (3,)], [(2, 6), (7,)]]
    rest = Layout(n_rows=6, cells=(((4, 5), (6, 7)),), micro_batch_rows=(((1, 1), (1, 1)),))
    both = taken.concat(rest)
    assert [both.micro_batches(0, rank) for rank in (0, 1)] == [
        [(0, 1), (3,), (4,), (5,)],
        [(2, 6), (7,), (8,), (9,)],
    ]
    assert (both.n_pads, both.left_out) == (4, ())


def test_actor_and_critic_of_different_sizes_have_no_step_of_pads_alone():
    # verl 0.9.1 gives the actor [8, 8, 8, 1, 0, 0] and the critic [12, 12, 1, 0] real rows.
    plan = plan_batch(batch([10] * 25), lcm_job(dp_size=4, actor=8, critic=12))
    assert plan.layouts["actor"].real_rows_M == (5, 4, 4, 4, 4, 4)
    assert plan.layouts["critic"].real_rows_M == (7, 6, 6, 6)


def plan_3509(strategy, packer):
    """One of the jobs that figures are told of: 3,509 rows of 400 prompts, on eight ranks."""
    job = five_jobs()[2]
    assert (len(job.tokens_R), job.mini_batch_rows, job.dp_size) == (3509, 80 * 8, 8)
    rows = Rows.from_keys([f"{row * 400 // 3509}_0_{row}" for row in range(3509)], job.tokens_R)
    update = Update(dp_size=8, token_budget=job.token_budget, prompts_per_mini_batch=80)
    return plan_batch(rows, job_of(strategy, prompts=400, sessions=8, packer=packer, actor=update))


def assert_even(figures):
    assert figures.imbalance < 1.001
    assert figures.micro_imbalance is None or figures.micro_imbalance < 1.005


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_400_prompts_of_3509_rows_make_the_five_steps_that_are_configured(packer):
    # 400 / 80 = 5 steps. 309 prompts have nine rows and 91 have eight. A rank holds 702 / 8 rows of
    # a step, rounded up to 88: 5 x 8 x 88 = 3520 = 3509 + 11 pads. The plan's packer makes cells a
    # row larger where that is faster.
    plan = plan_3509("prompt", packer)
    layout = plan.layouts["actor"]
    assert sorted(layout.real_rows_M) == [701, 702, 702, 702, 702]
    assert set(layout.cell_rows_M) == {"verl": {88}, "plan": {88, 89}}[packer]
    assert plan.n_pads == {"verl": 11, "plan": 35}[packer]
    assert_even(plan.figures["actor"])


def test_mini_batches_have_the_pads_they_need_and_many_are_told():
    # One prompt of 400 rows and 15 of 8, in micro-batches of 4 on 8 ranks: 416 + 15 x 32 = 520 rows
    # + 376 pads. In mini-batches of one size, the largest, there would be 16 x 416 - 520 = 6136.
    rows = Rows.from_keys(
        [f"p{p}_{s}_0" for p in range(16) for s in range(400 if p == 7 else 8)], [10] * 520
    )
    update = Update(dp_size=8, micro_batch_rows=4, prompts_per_mini_batch=1)
    plan = plan_batch(rows, job_of(prompts=16, sessions=8, actor=update))
    layout = plan.layouts["actor"]
    assert layout.n_pads == 376
    assert (layout.n_micro_batches, plan.hint) == (15 * 1 + 13, None)
    few = Rows.from_keys([f"p{p}_{s}_0" for p in range(16) for s in range(8)], [10] * 128)
    plan = plan_batch(few, job_of(prompts=16, sessions=8, actor=update))
    assert plan.n_pads == 16 * 32 - 128
    assert "use_dynamic_bsz" in plan.hint
    wide = replace(update, micro_batch_rows=1, dp_size=32)
    assert (
        "raise prompts_per_mini_batch, now 1"
        in plan_batch(few, job_of(prompts=16, sessions=8, actor=wide)).hint
    )


def test_what_the_updates_micro_batches_cost_a_pass_is_told():
    # docs/evidence.md has some of these figures.
    own, taken, micro_batches = [], [], []
    small = replace(five_jobs()[-1], dp_size=8, mini_batch_rows=23)
    for job in (*five_jobs(), small):
        call = {"dp_size": job.dp_size, "token_budget": job.token_budget}
        shape = job_of(
            "rows",
            prompts=job.verl_steps,
            inference={"own": Pass(**call), "log_prob": Pass(**call, as_update="actor")},
            packer="plan",
            actor=Update(**call, prompts_per_mini_batch=1),
        )
        figures = plan_batch(batch(job.tokens_R), shape).figures
        own.append(round(figures["own"].micro_over_lower_bound, 2))
        taken.append(round(figures["log_prob"].micro_over_lower_bound, 2))
        micro_batches.append((figures["log_prob"].micro_batches, figures["own"].micro_batches))
    assert taken == [1.04, 1.0, 1.0, 1.26, 1.0, 1.25]
    assert own == [1.0, 1.0, 1.0, 1.01, 1.0, 1.0]
    assert micro_batches == [(20, 18), (10, 10), (33, 30), (12, 9), (19, 18), (16, 5)]


@pytest.mark.parametrize(
    ("padded_to", "taken"), [("row", "actor"), ("micro_batch", "actor"), ("cell", None)]
)
def test_a_pass_takes_no_micro_batches_in_which_its_rows_would_be_longer(padded_to, taken):
    call = {"dp_size": 2, "token_budget": 100, "padded_to": padded_to}
    inference = {"log_prob": Pass(**call, as_update="actor")}
    actor = Update(**call, prompts_per_mini_batch=1)
    job = job_of("rows", prompts=2, inference=inference, packer="plan", actor=actor)
    assert reuses_layout_of(job, inference["log_prob"]) == taken
    # In order: a long row in the first mini-batch alone.
    rows = batch([60, 10, 10, 10, 20, 20, 20, 20])
    layout = plan_batch(rows, job).layouts["log_prob"]
    for rank in range(2):
        micro_batches = [[row for row in rows if row < 8] for rows in layout.micro_batches(0, rank)]
        longest = max(rows.tokens_R[row] for of_rank in micro_batches for row in of_rank)
        if padded_to == "cell":
            assert max(map(len, micro_batches)) * longest <= 100


def test_shuffle_changes_the_mini_batches_with_the_seed_and_nothing_else():
    def mini_batches(seed, shuffle):
        job = job_of(
            prompts=16, seed=seed, a=Update(dp_size=1, prompts_per_mini_batch=4, shuffle=shuffle)
        )
        return plan_batch(batch([10] * 16), job).layouts["a"].cells

    assert mini_batches(1, False) == mini_batches(2, False)
    assert mini_batches(1, True) == mini_batches(1, True)
    assert mini_batches(1, True) != mini_batches(2, True)


def test_an_empty_batch_is_refused():
    with pytest.raises(NoRealRowError, match=r"no real row in the batch: every session failed"):
        plan_batch(batch([]), lcm_job(actor=1))


def test_a_row_over_the_budget_is_refused_with_key_length_and_setting():
    call = Pass(dp_size=1, token_budget=50, budget_setting="ref.max_tokens")
    job = job_of("rows", inference={"ref": call})
    rows = Rows.from_keys(["a_0_0", "a_0_1"], [50, 51])
    with pytest.raises(
        RowTooLongError, match=r"row 'a_0_1' has 51 tokens.* 50 .*'ref'.*raise ref.max_tokens"
    ):
        plan_batch(rows, job)


@pytest.mark.parametrize("key", ["plain", "a_b", "a_0_x", "a_x_0", "_0_0", "a_-1_0", "a_0_1.5"])
def test_a_key_of_another_form_is_refused_by_name(key):
    with pytest.raises(
        PlanError, match=r"not of the form \{uid\}_\{session\}_\{index\}"
    ) as refusal:
        Rows.from_keys(["a_0_0", key], [3, 3])
    assert repr(key) in str(refusal.value)


@pytest.mark.parametrize(
    "tokens", [None, float("inf"), float("nan"), 7.9, 8.0, "8", 0, -1, True, 2**26 + 1, 2**70]
)
def test_a_row_without_a_whole_number_of_tokens_is_refused_with_it(tokens):
    with pytest.raises(
        PlanError, match=r"^row 'b_0_0' has .* tokens: a whole number from 1 to 67108864"
    ) as refusal:
        Rows.from_keys(["a_0_0", "b_0_0"], [3, tokens])
    assert f"has {tokens!r} tokens" in str(refusal.value)


def test_numpys_whole_numbers_are_tokens_too():
    assert Rows.from_keys(["a_0_0", "b_0_0"], np.array([3, 4], dtype=np.int32)).tokens_R == (3, 4)


@pytest.mark.parametrize("cost_model", ["tokens", "attention"])
def test_rows_whose_costs_do_not_fit_int64_are_refused_with_the_longest(cost_model):
    longest = 2**26
    job = replace(
        job_of("rows", inference={"ref": Pass(dp_size=2, token_budget=longest)}),
        cost_model=cost_model,
    )
    few, many = (batch([longest, *[5] * (n - 1)]) for n in (4, 300))
    figures = plan_batch(few, job).figures["ref"]
    assert figures.imbalance >= 1
    assert figures.over_lower_bound >= 1
    if cost_model == "tokens":
        assert plan_batch(many, job).n_rows == 300
    else:
        with pytest.raises(
            PlanError,
            match=r"^row 'p0_0_0' has 67108864 tokens: 300 rows .*choose cost_model=tokens",
        ):
            plan_batch(many, job)


def test_a_uid_may_hold_underscores():
    rows = Rows.from_keys(["math_7_0_1"], [5])
    assert (rows.prompt_R, rows.session_R) == (("math_7",), ("math_7_0",))


def test_a_mini_batch_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(
        PlanError, match=r"prompts_per_mini_batch=5 of 'actor' does not divide prompts=12.* 4 or 6"
    ):
        job_of(prompts=12, actor=Update(dp_size=1, prompts_per_mini_batch=5))


def test_a_fixed_size_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(PlanError, match=r"strategy='lcm'.*= 3 rows, not a multiple of dp_size=2"):
        lcm_job(dp_size=2, actor=3)
