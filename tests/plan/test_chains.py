"""Plans for engines that compute a chain of rows as its tip: forests of chains, and every cut of
small ones."""

import random
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drawn_jobs import forest_of_chains
from verl_padding.plan import STRATEGIES, Job, Layout, Pass, PlanError, Rows, Update, plan_batch
from verl_padding.plan.calls import SyncPoint
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.lower_bounds import micro_batch_bound

BUDGET = 64


@dataclass(frozen=True, kw_only=True)
class ChainedRows(Rows):
    extends_R: tuple[int | None, ...] = ()
    chain_R: tuple[int, ...] = ()


@st.composite
def forests(draw, most_prompts: int = 8) -> ChainedRows:
    """Sessions of rows that extend each other, or do not, in any order."""
    sessions = draw(st.lists(st.integers(1, 6), min_size=1, max_size=2 * most_prompts))
    random_ = draw(st.randoms(use_true_random=False))
    rows = []
    for number, n_rows in enumerate(sessions):
        tokens, last = 0, None
        for turn in range(n_rows):
            key = f"p{number % most_prompts}_{number // most_prompts}_{turn}"
            starts_anew = last is None or tokens > BUDGET - 12 or random_.random() < 0.2
            tokens = random_.randint(2, 12) + (0 if starts_anew else tokens)
            rows.append((key, tokens, None if starts_anew else last))
            last = key
    random_.shuffle(rows)
    place = {key: number for number, (key, _, _) in enumerate(rows)}
    tokens = [tokens for _, tokens, _ in rows]
    return chained(
        list(place), tokens, [None if earlier is None else place[earlier] for _, _, earlier in rows]
    )


def chained(keys: list[str], tokens: list[int], extends_R: list[int | None]) -> ChainedRows:
    """Rows of which some begin with the one that they extend; no row is extended by two."""
    chain_R = []
    for row in range(len(keys)):
        first = row
        while (earlier := extends_R[first]) is not None:
            first = earlier
        chain_R.append(first)
    rows = ChainedRows.from_keys(keys, tokens, forest_of_chains(tokens, chain_R))
    return replace(rows, extends_R=tuple(extends_R), chain_R=tuple(chain_R))


def job_of(
    strategy="prompt", dp_size=2, sharing="on", budget=BUDGET, mini=4, sync_point="micro_batch"
) -> Job:
    call = {"dp_size": dp_size, "token_budget": budget, "sync_point": sync_point}
    return Job(
        strategy=strategy,
        prompts=8,
        sessions_per_prompt=2,
        updates={"actor": Update(**call, prompts_per_mini_batch=mini)},
        inference={"log_prob": Pass(**call)},
        packer="plan",
        sharing=sharing,
    )


def extends(rows: ChainedRows, longer: int, shorter: int) -> bool:
    """Whether a row begins with another, step by step."""
    row: int | None = longer
    while row is not None and row != shorter:
        row = rows.extends_R[row]
    return row == shorter


def tips(rows: Rows, numbers) -> list[int]:
    """Rows that no other of these extends."""
    return [
        row
        for row in numbers
        if not any(other != row and extends(rows, other, row) for other in numbers)
    ]


@settings(max_examples=150)
@given(
    rows=forests(),
    strategy=st.sampled_from(list(STRATEGIES)),
    dp_size=st.sampled_from([1, 2, 4]),
    sync_point=st.sampled_from(get_args(SyncPoint)),
)
def test_the_budget_and_the_bound_are_those_of_the_tips(rows, strategy, dp_size, sync_point):
    plan = plan_batch(rows, job_of(strategy, dp_size, sync_point=sync_point))
    plain = plan_batch(rows, job_of(strategy, dp_size, sharing="off"))
    for name, layout in plan.layouts.items():
        assert sorted(row for row in layout.order if row < len(rows)) == list(range(len(rows)))
        # What a mini-batch holds is the strategy's business, whoever shares.
        assert layout.real_rows_M == plain.layouts[name].real_rows_M
        bound = 0
        for cells_D in layout.cells:
            least = tips(rows, [row for cell in cells_D for row in cell if row < len(rows)])
            tokens_I = np.array([rows.tokens_R[row] for row in least])
            bound += micro_batch_bound(tokens_I, attention_cost(tokens_I), dp_size, BUDGET)
        assert bound <= time_of(rows, layout)
        assert plan.figures[name].micro_over_lower_bound == pytest.approx(
            time_of(rows, layout) / bound
        )


def time_of(rows: Rows, layout: Layout) -> int:
    """Cost of the slowest rank of each micro-batch, counted from the tips, each within the
    budget."""
    time = 0
    for m in range(layout.n_mini_batches):
        held_KD = zip(
            *(layout.micro_batches(m, rank) for rank in range(layout.dp_size)), strict=True
        )
        for held_D in held_KD:
            loads = [0]
            for held in held_D:
                real = [row for row in held if row < len(rows)]
                tokens = [
                    *(rows.tokens_R[row] for row in tips(rows, real)),
                    *[2] * (len(held) - len(real)),
                ]
                assert sum(tokens) <= BUDGET
                loads.append(int(attention_cost(np.array(tokens)).sum()))
            time += max(loads)
    return time


@settings(max_examples=60)
@given(rows=forests(), sync_point=st.sampled_from(get_args(SyncPoint)))
def test_with_nothing_to_share_the_plan_is_that_without_sharing(rows, sync_point):
    alone = replace(rows, forest=forest_of_chains(rows.tokens_R, range(len(rows))))
    unknown = Rows.from_keys(rows.key_R, rows.tokens_R)
    want = plan_batch(unknown, job_of(sharing="off", sync_point=sync_point))
    for of_rows, sharing in [(alone, "on"), (unknown, "on"), (rows, "off")]:
        plan = plan_batch(of_rows, job_of(sharing=sharing, sync_point=sync_point))
        assert plan.layouts == want.layouts
        assert plan.figures == want.figures
        assert {figures.sharing_factor for figures in plan.figures.values()} == {1.0}


@pytest.mark.parametrize("sync_point", get_args(SyncPoint))
def test_chains_stay_whole_and_few_pads_are_needed_where_sessions_are_alike(sync_point):
    keys = [
        f"p{prompt}_{session}_{turn}"
        for prompt in range(8)
        for session in range(2)
        for turn in range(4)
    ]
    tokens = [10 * (turn + 1) for _ in range(16) for turn in range(4)]
    rows = chained(keys, tokens, [None if row % 4 == 0 else row - 1 for row in range(64)])
    plan = plan_batch(rows, job_of(sync_point=sync_point))
    for figures in plan.figures.values():
        assert figures.sharing_factor == 100 / 40
        assert figures.pads == 0
        assert figures.micro_over_lower_bound == 1


def test_no_cut_of_a_few_chains_is_faster_than_the_bound_and_the_plan_is_near_the_fastest():
    draw, over = random.Random(3), []
    for _ in range(60):
        sessions = [draw.randint(1, 3) for _ in range(draw.randint(2, 4))]
        keys, tokens, earlier = [], [], []
        for number, n_rows in enumerate(sessions):
            for turn in range(n_rows):
                keys.append(f"p{number}_0_{turn}")
                tokens.append(draw.randint(4, 20) + (tokens[-1] if turn else 0))
                earlier.append(len(keys) - 2 if turn else None)
        rows = chained(keys, tokens, earlier)
        plan = plan_batch(rows, job_of(mini=8))
        cost = attention_cost(np.array(tokens))
        fastest = _fastest(rows, cost, n_ranks=2, budget=BUDGET)
        time = time_of(rows, plan.layouts["actor"])
        assert time / plan.figures["actor"].micro_over_lower_bound <= fastest * (1 + 1e-9)
        over.append(time / fastest)
    # Pads, which the fastest cut does not have, are a tenth of such short rows.
    assert np.median(over) < 1.03, over
    assert max(over) < 1.2, over


def _fastest(rows: Rows, cost, *, n_ranks: int, budget: int) -> int:
    """The least sum of the heights over all ways to put rows into however many micro-batches, pads
    left out."""
    chain, order = rows.chain_R, sorted(range(len(rows)), key=lambda row: -rows.tokens_R[row])
    # Rows of a chain in one place cost what the longest of them does: look at whole chains only,
    # which are no costlier.
    heads = [
        row
        for row in order
        if all(chain[row] != chain[other] for other in order[: order.index(row)])
    ]
    empty = ((0, 0),) * n_ranks

    def least(row: int, levels: tuple[tuple[tuple[int, int], ...], ...]) -> int:
        """With the chains from one on still to be put. A level is the cost and the tokens of each
        rank."""
        if row == len(heads):
            return sum(max(load for load, _ in level) for level in levels)
        tokens, times = rows.tokens_R[heads[row]], []
        for number, level in enumerate((*levels, empty)):
            for rank, (load, used) in enumerate(level):
                if used + tokens <= budget:
                    bins = (
                        *level[:rank],
                        (load + int(cost[heads[row]]), used + tokens),
                        *level[rank + 1 :],
                    )
                    times.append(least(row + 1, (*levels[:number], bins, *levels[number + 1 :])))
        return min(times)

    return least(0, ())


def test_sharing_without_the_plans_packer_is_refused():
    with pytest.raises(PlanError, match=r"sharing='on' with packer='verl'.*packer='plan'"):
        replace(job_of(), packer="verl")
