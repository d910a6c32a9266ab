"""Micro-batches that cost more than their rows do alone: how full they are to be is searched.

Everything that deals rows reckons with costs that add up. Where pairs of tokens of two rows cost something, d each
(:class:`~verl_padding.plan.measured_cost.MeasuredCost`), a row of L tokens takes d L (T - L) of a micro-batch of T
tokens: that adds up too, once T is known. So a few fills T are tried, from the token budget down by halves. For each,
rows are priced for a micro-batch of T tokens and dealt with T in the place of the budget; what the layout really costs
decides. A row longer than T is alone in its micro-batch: while rows are dealt it counts as T tokens, and nothing fits
beside it.

A cost that does not know yet what depends on the fill may ask for one: then that fill alone is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.cost import MicroBatchCost
from verl_padding.plan.job import Packer
from verl_padding.plan.layout import Layout
from verl_padding.plan.mini_batch_costs import micro_batches_of, mini_batch_costs
from verl_padding.plan.mini_batches import MiniBatches

HALVES = 6
"""Times that the fill is halved at most."""

Deal = Callable[[CallCosts, Packer, MiniBatches], Layout]


def deal_by_fill(deal: Deal, costs: CallCosts, packer: Packer, mini_batches: MiniBatches) -> Layout:
    """The layout that takes the least time, of those for a few fills.

    Args:
        deal: deals rows whose costs add up.
        costs: the call's; its cost model is one of micro-batches, for rows alone.
    """
    model = costs.cost_model
    assert isinstance(model, MicroBatchCost)
    assert not model.fill
    call = costs.call
    if call.token_budget is None or packer == "verl":
        fill = call.token_budget or int(costs.tokens_R.mean()) * call.micro_batch_rows
        return deal(replace(costs, cost_model=model.at(fill)), packer, mini_batches)
    layouts = [deal(_priced_for(fill, costs, model), packer, mini_batches) for fill in _fills(costs, model)]
    return layouts[0] if len(layouts) == 1 else min(layouts, key=lambda layout: layout_time(layout, costs))


def layout_time(layout: Layout, costs: CallCosts) -> int:
    """What a layout costs the slowest ranks, where they meet, with the handling of its pads."""
    steps = mini_batch_costs(micro_batches_of(layout), costs, with_micro_bounds=False)
    meets_often = costs.call.ranks_meet == "micro_batch"
    slowest = sum(step.micro_slowest if meets_often else step.mini_slowest for step in steps)
    return slowest + layout.n_pads * costs.pad_handling


def _priced_for(fill: int, costs: CallCosts, model: MicroBatchCost) -> CallCosts:
    return replace(
        costs,
        call=replace(costs.call, token_budget=fill),
        tokens_R=np.minimum(costs.tokens_R, fill),
        own_cost_R=model.at(fill)(costs.tokens_R),
        cost_model=model.at(fill),
    )


def _fills(costs: CallCosts, model: MicroBatchCost) -> Iterator[int]:
    """The token budget, its half, and so on, while micro-batches of so many tokens hold a row of the mean length.

    None that is emptier than what was measured allows to foretell. Where a fill is to be tried, that one alone; where
    rows cost the same in micro-batches of any fill, the token budget alone.
    """
    budget = costs.call.token_budget
    assert budget is not None
    # Of a chain, the longest row is computed: as long as it is, no shorter one may count as the same.
    longest = int(costs.tokens_R.max()) if costs.chain_R is not None else 0
    least = max(int(costs.tokens_R.mean()), costs.pad_tokens, longest)
    if model.trial_fill:
        yield min(max(model.trial_fill, least), budget)
        return
    yield budget
    for halves in range(1, HALVES + 1 if model.depends_on_fill else 1):
        if budget >> halves < max(least, model.least_fill):
            return
        yield budget >> halves
