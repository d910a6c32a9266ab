"""Micro-steps, against every way there is on small mini-batches; and what runs of rows of a trie
take of a token budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.call_costs import costs_of
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.packing.sync_per_micro_batch import PackingUnits
from verl_padding.plan.prefix_tries import PrefixTries

EXAMPLES = settings(max_examples=200)


def packer_of(tokens, n_ranks, budget, multiple=1):
    costs = costs_of(tokens, dp_size=n_ranks, token_budget=budget, micro_batch_multiple=multiple)
    return PackingUnits.from_rows(costs, range(len(tokens)))


def time_of(packer, steps):
    """Cost of the costliest bin of each micro-step, and its handling, which takes as long as a row
    of 256 tokens."""
    costliest = (
        max(sum(packer.cost_I[item] for item in items) for items in step) for step in steps
    )
    return sum(costliest) + len(steps) * int(attention_cost(np.array([256]))[0])


def partitions(items):
    """Every way to put items into bins."""
    if not items:
        yield []
        return
    for bins in partitions(items[1:]):
        for number in range(len(bins)):
            yield [*bins[:number], [items[0], *bins[number]], *bins[number + 1 :]]
        yield [[items[0]], *bins]


def best_of_all(packer):
    """Least time, found by trying everything."""
    times = []
    for bins in partitions(list(range(len(packer.tokens_I)))):
        if all(
            sum(packer.tokens_I[item] for item in items) <= packer.costs.token_budget
            for items in bins
        ):
            empty = [[] for _ in range(-len(bins) % packer.costs.call.dp_size)]
            times.append(time_of(packer, packer.group_into_micro_steps([*bins, *empty])))
    return min(times)


def small_mini_batches(seed, number):
    rng = np.random.default_rng(seed)
    for _ in range(number):
        n_ranks = int(rng.integers(1, 4))
        tokens = np.clip(
            rng.lognormal(np.log(1500), rng.uniform(0.2, 1.2), rng.integers(1, 9)), 16, 16384
        ).astype(int)
        yield packer_of(tokens.tolist(), n_ranks, int(tokens.max() * rng.choice([1, 1.5, 2, 4])))


def test_small_mini_batches_are_packed_almost_as_well_as_can_be():
    over = []
    for packer in small_mini_batches(seed=0, number=120):
        best, found = best_of_all(packer), packer.micro_steps()
        # No rank without a row where there are enough: trying everything does not know that rule.
        if len(packer.tokens_I) >= packer.costs.call.dp_size:
            assert all(found[0])
        assert time_of(packer, found) >= best or not all(found[0])
        over.append(time_of(packer, found) / best)
    exact = np.mean(np.array(over) == 1)
    print(
        f"over the best: {np.mean(over):.4f} on average, {max(over):.4f} at most, exact in "
        f"{exact:.0%}"
    )
    assert np.mean(over) < 1.005
    assert max(over) < 1.07


@st.composite
def mini_batches(draw):
    tokens = draw(st.lists(st.integers(1, 500), min_size=1, max_size=60))
    return packer_of(tokens, draw(st.integers(1, 6)), max(tokens) * draw(st.integers(1, 5)))


@EXAMPLES
@given(packer=mini_batches(), multiple=st.integers(1, 3))
def test_a_cut_holds_all_items_in_budget(packer, multiple):
    packer = packer_of(
        packer.tokens_I, packer.costs.call.dp_size, packer.costs.token_budget, multiple
    )
    steps = packer.micro_steps()
    bins = [items for step in steps for items in step]
    assert sorted(item for items in bins for item in items) == list(range(len(packer.tokens_I)))
    assert all(
        sum(packer.tokens_I[item] for item in items) <= packer.costs.token_budget for items in bins
    )
    assert all(len(step) == packer.costs.call.dp_size for step in steps)
    assert len(steps) % multiple == 0


@pytest.mark.parametrize(
    ("prompt", "sessions", "budget", "least", "multiple", "n_rows_K"),
    [
        (100, 64, 2048, 1, 1, [64]),  # 110 + 63 x 11 tokens
        (100, 64, 2048, 128, 1, [16, 16, 16, 16]),  # 110 + 15 x 128
        (100, 64, 352, 1, 16, [16, 16, 16, 16]),  # 112 + 15 x 16
        # All fit into one micro-batch if nothing is shared: 200 x 20 tokens.
        (10, 200, 4096, 128, 1, [32, 32, 32, 32, 32, 32, 8]),
    ],
)
def test_rows_that_branch_take_no_less_of_the_budget_than_is_said(
    prompt, sessions, budget, least, multiple, n_rows_K
):
    """Rollouts of ten tokens, of one prompt."""
    tokens = [prompt + 10] * sessions
    tries = PrefixTries.in_order(tokens, range(sessions), [0, *[prompt] * (sessions - 1)])
    rows = Rows.from_keys([f"a_{session}_0" for session in range(sessions)], tokens, tries=tries)
    update = Update(
        dp_size=1,
        token_budget=budget,
        prompts_per_mini_batch=1,
        min_branch_tokens=least,
        token_multiple=multiple,
    )
    job = Job(
        strategy="prompt",
        prompts=1,
        sessions_per_prompt=sessions,
        updates={"actor": update},
        inference={},
        packer="plan",
        sharing="on",
    )
    layout = plan_batch(rows, job).layouts["actor"]
    assert list(map(len, layout.rows_MDK[0][0])) == n_rows_K
