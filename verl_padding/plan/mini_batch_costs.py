"""What the optimizer steps of a layout cost: the one place where layouts of any origin are tallied
and scored."""

from collections import Counter

from verl_padding.plan.batch_plan import LayoutFigures
from verl_padding.plan.call_costs import CallCosts, flatten_micro_batches
from verl_padding.plan.layout import Layout, RowsMDK


def score_layout(layout: Layout, costs: CallCosts) -> LayoutFigures:
    """The figures of a layout."""
    total: Counter[str] = Counter()
    for step in mini_batch_costs(layout.rows_MDK, costs):
        total.update(step)
    n_micro = None if layout.cut_by == "verl" else total["micro_batches"]
    n_ranks, computed = layout.dp_size, total["computed_tokens"]
    room = (n_micro or 0) * n_ranks * (costs.call.token_budget or 0)
    return LayoutFigures(
        imbalance=total["mini_slowest"] * n_ranks / total["cost"],
        micro_batches=n_micro,
        packing_efficiency=computed / room if room else None,
        computed_tokens=computed,
        sharing_factor=total["real_tokens"] / computed,
        micro_imbalance=total["micro_slowest"] * n_ranks / total["cost"] if n_micro else None,
    )


def mini_batch_costs(rows_MDK: RowsMDK, costs: CallCosts) -> list[dict[str, int]]:
    """Of each optimizer step of any layout, also of stock verl's: numbers of ``real_rows``,
    ``pads`` and a rank's ``micro_batches``; ``real_tokens``, of the real rows, and of these
    ``computed_tokens``, which rows of a micro-batch share, once; with its pads, the ``cost`` of all
    that is computed, that of the slowest rank (``mini_slowest``: the time if ranks synchronize once
    per step), and that of the slowest rank of each micro-batch, summed (``micro_slowest``: the time
    if they synchronize at each).

    Example: rows of 700, 300 and 900 tokens that cost as many, a pad of 2, and micro-batches
    ``[[[2], [3]]]`` on rank 0 and ``[[[0], [1]]]`` on rank 1 cost 900 + 300 where ranks synchronize
    at each, and 1,000 where they do so once.

    Args:
        rows_MDK: all ranks of a step have equally many micro-batches. If the workers cut the local
            mini-batches, each is one micro-batch here.
        costs: the call's.
    """
    steps = []
    for rows_DK in rows_MDK:
        numbers, _ = flatten_micro_batches(rows_DK)
        real = numbers[numbers < costs.n_rows]
        n_pads, real_tokens = len(numbers) - len(real), int(costs.tokens_R[real].sum())
        tokens_DK, _, load_DK = costs.micro_batch_loads(rows_DK)
        shared_computed = int(tokens_DK.sum()) - n_pads * costs.pad_tokens
        steps.append(
            {
                "real_rows": len(real),
                "pads": n_pads,
                "real_tokens": real_tokens,
                "computed_tokens": real_tokens if costs.tries is None else shared_computed,
                "cost": int(load_DK.sum()),
                "micro_batches": load_DK.shape[1],
                "mini_slowest": int(load_DK.sum(axis=1).max()),
                "micro_slowest": int(load_DK.max(axis=0).sum()),
            }
        )
    return steps
