"""Micro-batches that cost more than their rows do alone: how full they are to be is searched.

Every way to fill cells adds costs up. Where pairs of tokens of two rows cost something, d each
(:class:`~verl_padding.plan.measured_cost.MeasuredCost`), a row of L tokens takes d L (T - L) of a micro-batch of T
tokens: that adds up too, once T is known. So a few fills T are tried, from the token budget down by halves. For each,
rows are priced for a micro-batch of T tokens and packed with T in the place of the budget; what the layout really costs
decides. Of many rows, a part is packed for each fill, on a part of the ranks, and the best fill is taken for all. A row
longer than T is alone in its micro-batch: while rows are packed it counts as T tokens, and nothing fits beside it.
A cost that does not know yet what depends on the fill may ask for one: then that fill alone is planned.
"""

from dataclasses import replace

import numpy as np

from verl_padding.plan.call_costs import CallCosts
from verl_padding.plan.measured_cost import MeasuredCost
from verl_padding.plan.mini_batch_costs import layout_time
from verl_padding.plan.mini_batches import MiniBatches
from verl_padding.plan.packing.way import Way

SAMPLED = 8192
"""Rows for which fills are compared, about: more of them change nothing but the time that it takes."""
HALVES = 6
"""Times that the fill is halved at most."""


def at_best_fill(way: Way, costs: CallCosts, mini_batches: MiniBatches) -> CallCosts:
    """The costs of a call with rows priced for the fill by which its layout takes the least time, of a few fills."""
    model, call = costs.cost_model, costs.call
    assert isinstance(model, MeasuredCost)
    assert not model.fill, "rows are priced for a fill already"
    if call.token_budget is None or not way.cuts_micro_batches:
        fill = call.token_budget or int(costs.tokens_R.mean()) * call.micro_batch_rows
        return replace(costs, cost_model=model.at(fill))
    fills = _fills(costs, model)
    if len(fills) == 1:
        return _priced_for(fills[0], costs, model)
    sample, ranks = _sample(mini_batches, call.dp_size)
    of_few = replace(costs, call=replace(call, dp_size=ranks))
    best = min(
        fills, key=lambda fill: layout_time(way.layout(_priced_for(fill, of_few, model), sample, of_few), of_few)
    )
    return _priced_for(best, costs, model)


def _sample(mini_batches: MiniBatches, ranks: int) -> tuple[MiniBatches, int]:
    """The first mini-batches, about ``SAMPLED`` rows of them, and their ranks.

    Of a mini-batch that alone has more, unless its size is fixed, the first rows are taken, on that part of the ranks.
    """
    rows_M = mini_batches.rows_M
    n_taken = max(1, SAMPLED // max(map(len, rows_M)))
    part = len(rows_M[0]) // SAMPLED
    if n_taken > 1 or part < 2 or mini_batches.mini_batch_rows is not None:
        return replace(mini_batches, rows_M=rows_M[:n_taken]), ranks
    of_sample = max(1, ranks // part)
    return replace(mini_batches, rows_M=[rows_M[0][: len(rows_M[0]) * of_sample // ranks]]), of_sample


def _priced_for(fill: int, costs: CallCosts, model: MeasuredCost) -> CallCosts:
    return replace(
        costs,
        call=replace(costs.call, token_budget=fill),
        tokens_R=np.minimum(costs.tokens_R, fill),
        own_cost_R=model.at(fill)(costs.tokens_R),
        cost_model=model.at(fill),
    )


def _fills(costs: CallCosts, model: MeasuredCost) -> list[int]:
    """The token budget, its half, and so on, while micro-batches of so many tokens hold a row of the mean length.

    None that is emptier than what was measured allows to predict. Where a fill is to be tried, that one alone; where
    rows cost the same in micro-batches of any fill, the token budget alone.
    """
    budget = costs.call.token_budget
    assert budget is not None
    # Of a chain, the longest row is computed: as long as it is, no shorter one may count as the same.
    longest = int(costs.tokens_R.max()) if costs.forest is not None else 0
    least = max(int(costs.tokens_R.mean()), costs.pad_tokens, longest)
    if model.trial_fill:
        return [min(max(model.trial_fill, least), budget)]
    halved = [budget >> halves for halves in range(1, HALVES + 1)] if model.per_pair_s else []
    return [budget, *(fill for fill in halved if fill >= max(least, model.least_fill))]
