"""MicroSteps of micro-batches: against every way there is on small mini-batches, and against the
lower bound on all."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.calls import Pass
from verl_padding.plan.cost import attention_cost
from verl_padding.plan.packing.packing_units import PackingUnits
from verl_padding.plan.packing.pads import Cut, fit
from verl_padding.plan.packing.sync_per_micro_batch import MicroStepPacker, MicroSteps

EXAMPLES = settings(max_examples=200)


def costs_of(tokens: list[int], n_ranks: int, budget: int, multiple: int = 1) -> CallCosts:
    return CallCosts(
        call=Pass(dp_size=n_ranks, token_budget=budget, micro_batch_multiple=multiple),
        tokens_R=np.array(tokens, dtype=np.int64),
        cost_model=attention_cost,
        pad_tokens=2,
    )


def packer_of(tokens: list[int], n_ranks: int, budget: int, multiple: int = 1) -> MicroStepPacker:
    costs = costs_of(tokens, n_ranks, budget, multiple)
    return MicroStepPacker(costs, PackingUnits.from_rows(costs, range(len(tokens))))


def packed(packer: MicroStepPacker) -> MicroSteps:
    return min(packer.candidates(), key=lambda steps: steps.time)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into bins."""
    if not items:
        yield []
        return
    for bins in partitions(items[1:]):
        for number in range(len(bins)):
            yield [*bins[:number], [items[0], *bins[number]], *bins[number + 1 :]]
        yield [[items[0]], *bins]


def best_of_all(packer: MicroStepPacker) -> tuple[int, int]:
    """Least time and least height, found by trying everything."""
    times, heights = [], []
    for bins in partitions(list(range(len(packer.tokens_I)))):
        if all(
            sum(packer.tokens_I[item] for item in items) <= packer.token_budget for items in bins
        ):
            steps = packer.group_into_micro_steps(bins)
            times.append(steps.time)
            heights.append(steps.height)
    return min(times), min(heights)


def small_mini_batches(seed: int, number: int) -> Iterator[MicroStepPacker]:
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
        best, least_height = best_of_all(packer)
        found = packed(packer)
        # No rank without a row where there are enough: trying everything does not know that rule.
        if len(packer.tokens_I) >= packer.n_ranks:
            assert all(found.bins_KD[0])
        assert packer.bound <= least_height
        assert found.time >= best or not all(found.bins_KD[0])
        over.append(found.time / best)
    exact = np.mean(np.array(over) == 1)
    print(
        f"over the best: {np.mean(over):.4f} on average, {max(over):.4f} at most, exact in "
        f"{exact:.0%}"
    )
    assert np.mean(over) < 1.005
    assert max(over) < 1.06


@st.composite
def mini_batches(draw) -> MicroStepPacker:
    tokens = draw(st.lists(st.integers(1, 500), min_size=1, max_size=60))
    return packer_of(tokens, draw(st.integers(1, 6)), max(tokens) * draw(st.integers(1, 5)))


@EXAMPLES
@given(packer=mini_batches(), multiple=st.integers(1, 3))
def test_every_way_to_cut_holds_all_items_in_budget_at_its_height(packer, multiple):
    packer = packer_of(packer.tokens_I, packer.n_ranks, packer.token_budget, multiple)
    ways = list(packer.candidates())
    assert ways
    for steps in ways:
        bins = [items for step in steps.bins_KD for items in step]
        assert sorted(item for items in bins for item in items) == list(range(len(packer.tokens_I)))
        assert all(
            sum(packer.tokens_I[item] for item in items) <= packer.token_budget for items in bins
        )
        assert all(len(step) == packer.n_ranks for step in steps.bins_KD)
        assert len(steps.bins_KD) % multiple == 0
        heights = [
            max(sum(packer.cost_I[item] for item in items) for items in step)
            for step in steps.bins_KD
        ]
        assert steps.height == sum(heights) >= packer.bound


def test_a_cut_with_more_micro_batches_than_a_cell_has_rows_does_not_fit():
    costs = costs_of([50, 50], n_ranks=1, budget=100)
    cut = Cut(rows_DK=[[[0], [1], []]], time=0)
    assert fit(costs, cut, size=2) is None
    fitted = fit(costs, cut, size=3)
    assert fitted is not None
    assert fitted.rows_DK == [[[0], [1], [costs.n_rows]]]
