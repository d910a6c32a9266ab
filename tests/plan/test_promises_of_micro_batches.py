"""The promises of a plan's micro-batches, on random batches and jobs."""

from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.drawn_jobs import batches, jobs
from tests.support.plan_oracles import (
    EXAMPLES,
    MOSTLY_CUT_BY_PLAN,
    OFTEN,
    computed,
    leaves,
    met,
    none_is_vacuous,
    planned,
)
from verl_padding.plan.planner import reuses_layout_of

SEVERAL_STEPS = "plans of several steps whose micro-batches a pass takes over"


@pytest.fixture(scope="module", autouse=True)
def _not_vacuous():
    yield from none_is_vacuous(
        often=OFTEN,
        now_and_then=(
            "micro-batches",
            "micro-batches of pads alone",
            "rows that are computed in others",
            "rows that branch",
            "updates of unequal micro-batches",
            SEVERAL_STEPS,
        ),
    )


@EXAMPLES
@given(rows=batches(), job=jobs(pass_cut_as_update=True))
def test_a_pass_cut_as_its_update_has_its_micro_batches_in_their_order(rows, job):
    plan = planned(rows, job)
    assert reuses_layout_of(job, job.inference["log_prob"]) == "actor"
    ours, theirs = plan.layouts["log_prob"], plan.layouts["actor"]
    met[SEVERAL_STEPS] += theirs.n_mini_batches > 1
    assert ours.n_mini_batches == 1
    for rank in range(theirs.dp_size):
        of_update = [rows_DK[rank] for rows_DK in theirs.rows_MDK]
        assert ours.rows_MDK[0][rank] == sum(of_update, ())


@EXAMPLES
@given(rows=batches(), job=jobs())
def test_micro_batches_of_a_fixed_size_are_as_few_as_each_mini_batch_needs(rows, job):
    plan = planned(rows, job)
    for name, call in job.calls():
        layout = plan.layouts[name]
        for mini_batch in range(layout.n_mini_batches if call.token_budget is None else 0):
            n_rows = layout.real_rows_M[mini_batch]
            if job.strategy == "lcm":  # all pads of the mini-batch are computed
                n_rows = layout.local_batch_rows_M[mini_batch] * call.dp_size
            fewest = -(-n_rows // (call.dp_size * call.micro_batch_rows))
            fewest = -(-fewest // call.micro_batch_multiple) * call.micro_batch_multiple
            assert [*map(len, layout.rows_MDK[mini_batch])] == [fewest] * call.dp_size


@EXAMPLES
@given(drawn=MOSTLY_CUT_BY_PLAN)
def test_the_largest_micro_batch_of_an_update_comes_first(drawn):
    rows, job = drawn
    plan = planned(rows, replace(job, packer="plan"))
    for name, update in job.updates.items():
        for rows_DK in plan.layouts[name].rows_MDK if update.token_budget is not None else ():
            tokens_DK = [
                [len(computed(rows, job, update, held)) for held in rows_K] for rows_K in rows_DK
            ]
            tokens_K = [*map(max, zip(*tokens_DK, strict=True))]
            met["updates of unequal micro-batches"] += len(set(tokens_K)) > 1
            assert tokens_K == sorted(tokens_K, reverse=True)


@EXAMPLES
@given(drawn=MOSTLY_CUT_BY_PLAN)
def test_micro_batches_cut_local_batches_within_the_budget_alike_on_every_rank(drawn):
    rows, job = drawn
    plan = planned(rows, job)
    for name, call in job.calls():
        layout = plan.layouts[name]
        if call.token_budget is not None and job.packer == "verl":
            assert layout.cut_by == "verl"
            continue
        assert layout.cut_by != "verl"
        for rows_DK, local_batches in zip(layout.rows_MDK, layout.local_batches, strict=True):
            n_micro_batches = len(rows_DK[0])
            met["micro-batches"] += n_micro_batches
            assert {*map(len, rows_DK)} == {n_micro_batches}
            assert n_micro_batches % call.micro_batch_multiple == 0
            for micro_batches, local_batch in zip(rows_DK, local_batches, strict=True):
                assert sum(micro_batches, ()) == local_batch
                for micro_batch in micro_batches:
                    assert micro_batch
                    met["micro-batches of pads alone"] += min(micro_batch) >= len(rows)
                    if call.token_budget is None:
                        assert len(micro_batch) == call.micro_batch_rows
                    else:
                        met["rows that are computed in others"] += len(micro_batch) - len(
                            leaves(rows, job, call, micro_batch)
                        )
                        assert len(computed(rows, job, call, micro_batch)) <= call.token_budget
