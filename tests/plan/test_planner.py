"""Single cases of the planner: figures that are known, and everything it refuses."""

from dataclasses import replace

import pytest

from tests.support.plan_oracles import layout_of_local_batches
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
    # Two mini-batches, two ranks, local mini-batches of two rows and of one. Row 5 is pad 0 of 5
    # rows.
    layout = layout_of_local_batches(5, (((0, 1), (2, 5)), ((3,), (4,))))
    assert layout.order == (0, 1, 3, 2, 5, 4)
    assert layout.local_batch_rows_M == (2, 1)
    assert layout.real_rows_M == (3, 2)
    assert layout.n_pads == 1


def test_a_pass_has_the_updates_micro_batches_and_then_other_rows():
    update = Layout(
        n_rows=6,
        rows_MDK=((((0, 1),), ((2, 6),)), (((3,),), ((7,),))),
        dropped=((4, 5), ()),
    )
    taken = update.flatten_for_pass()
    assert taken.rows_MDK == ((((0, 1), (3,)), ((2, 6), (7,))),)
    both = taken.concat(Layout(n_rows=6, rows_MDK=((((4,), (5,)), ((6,), (7,))),)))
    assert both.rows_MDK == ((((0, 1), (3,), (4,), (5,)), ((2, 6), (7,), (8,), (9,))),)
    assert (both.n_pads, both.dropped) == (4, ())


def test_actor_and_critic_of_different_sizes_have_no_step_of_pads_alone():
    # verl 0.9.1 gives the actor [8, 8, 8, 1, 0, 0] and the critic [12, 12, 1, 0] real rows.
    plan = plan_batch(batch([10] * 25), lcm_job(dp_size=4, actor=8, critic=12))
    assert plan.layouts["actor"].real_rows_M == (5, 4, 4, 4, 4, 4)
    assert plan.layouts["critic"].real_rows_M == (7, 6, 6, 6)


def test_the_setting_for_fewer_pads_is_named_where_they_outnumber_the_rows():
    # 16 prompts of 8 rows, in micro-batches of 4 on 8 ranks: a mini-batch takes 32 rows.
    rows = Rows.from_keys([f"p{p}_{s}_0" for p in range(16) for s in range(8)], [10] * 128)
    update = Update(dp_size=8, micro_batch_rows=4, prompts_per_mini_batch=1)
    plan = plan_batch(rows, job_of(prompts=16, sessions=8, actor=update))
    assert plan.n_pads == 16 * 32 - 128
    assert "use_dynamic_bsz" in plan.hint
    assert "raise prompts_per_mini_batch, now 1" in plan.hint
    fewer = replace(update, dp_size=2)
    assert plan_batch(rows, job_of(prompts=16, sessions=8, actor=fewer)).hint is None
    # One mini-batch, cut by tokens already: only fewer ranks help.
    alone = Update(dp_size=8, token_budget=100, prompts_per_mini_batch=1)
    hint = plan_batch(batch([10] * 3), job_of(actor=alone)).hint
    assert "fewer ranks" in hint
    assert "use_dynamic_bsz" not in hint
    assert "raise" not in hint
    by_lcm = plan_batch(batch([10] * 3), lcm_job(actor=8)).hint
    assert "another strategy" in by_lcm
    assert "ranks," not in by_lcm


@pytest.mark.parametrize(
    ("padded_to", "taken"), [("row", "actor"), ("micro_batch", "actor"), ("local_batch", None)]
)
def test_a_pass_takes_no_micro_batches_in_which_its_rows_would_be_longer(padded_to, taken):
    call = {"dp_size": 2, "token_budget": 100, "padded_to": padded_to}
    inference = {"log_prob": Pass(**call, as_update="actor")}
    actor = Update(**call, prompts_per_mini_batch=1)
    job = job_of("rows", prompts=2, inference=inference, packer="plan", actor=actor)
    assert reuses_layout_of(job, inference["log_prob"]) == taken


def test_shuffle_changes_the_mini_batches_with_the_seed_and_nothing_else():
    def mini_batches(seed, shuffle):
        job = job_of(
            prompts=16, seed=seed, a=Update(dp_size=1, prompts_per_mini_batch=4, shuffle=shuffle)
        )
        return plan_batch(batch([10] * 16), job).layouts["a"].local_batches

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


def test_rows_whose_costs_no_integer_holds_are_refused():
    rows = Rows.from_keys([f"a_0_{row}" for row in range(512)], [3] * 511 + [2**26])
    call = Pass(dp_size=1, token_budget=2**26)
    with pytest.raises(RowTooLongError, match=r"row 'a_0_511' has 67108864 tokens"):
        plan_batch(rows, job_of("rows", inference={"ref": call}))


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


def test_a_mini_batch_that_does_not_divide_the_prompts_is_refused():
    with pytest.raises(
        PlanError, match=r"prompts_per_mini_batch=5 of 'actor' does not divide prompts=12"
    ):
        job_of(prompts=12, actor=Update(dp_size=1, prompts_per_mini_batch=5))


@pytest.mark.parametrize("name", ["packer", "sharing", "strategy", "cost_model"])
def test_a_choice_that_there_is_not_is_refused_with_those_there_are(name):
    with pytest.raises(PlanError, match=rf"^{name}='auto': .*{getattr(job_of(), name)}"):
        replace(job_of(), **{name: "auto"})


@pytest.mark.parametrize("name", ["sync_point", "padded_to"])
def test_so_is_one_of_a_call(name):
    with pytest.raises(PlanError, match=rf"^{name}='step': .*micro_batch"):
        Pass(dp_size=1, **{name: "step"})


def test_a_fixed_size_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(PlanError, match=r"strategy='lcm'.*= 3 rows, not a multiple of 2 "):
        lcm_job(dp_size=2, actor=3)
