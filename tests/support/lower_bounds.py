"""What no plan can beat, whatever it does."""

import numpy as np


def micro_batch_bound(tokens_I, cost_I, n_ranks, token_budget):
    """Least sum, over the micro-batches of a mini-batch, of the cost of the slowest rank.

    Call the cost of the slowest rank of micro-batch k, for each k, its height. The highest come
    first. Three facts:

    - A micro-batch of height h costs the n ranks at most n h together, so the height is at least
      the mean of the ranks.
    - n bins together hold at most the cost G(n) of the longest rows with n x budget tokens in sum,
      the last one in part: cost per token rises with length.
    - Rows longer than half the budget never share a bin. With more than j n of them, more than j
      micro-batches hold one: micro-batch j is at least as high as long row j n is costly (counting
      both from 0).

    So the first j micro-batches are at least as high as rows 0, n, .. (j - 1) n, and what their
    bins cannot hold is at best shared out evenly over the rest: height >= cost_0 + .. + cost_(j-1)n
    + (total - G(j n)) / n. Row 0 may be shorter than half the budget. The largest value over all j
    is the bound.

    Args:
        tokens_I: tokens of each row; more tokens cost more.
        token_budget: most tokens of a micro-batch on a rank.
    """
    # Rows of 9, 8 and 6 tokens, two ranks, a budget of 10 and a cost of one a token: the mean of
    # the ranks is 11.5. But no two rows share a bin, so with j = 2 a first micro-batch is as high
    # as row 0, and a second one as row 2: 9 + 6 = 15, which 9 | 8 and then 6 | pads reach.
    n_rows = len(cost_I)
    if not n_rows:
        return 0
    longest_first = np.argsort(-tokens_I, kind="stable")
    tokens, cost = tokens_I[longest_first].tolist(), cost_I[longest_first].tolist()
    total = sum(cost)
    bound = -(-total // n_ranks)
    longest_row_costs = held = held_tokens = filled = micro_step = 0
    while micro_step * n_ranks < n_rows and (
        not micro_step or 2 * tokens[micro_step * n_ranks] > token_budget
    ):
        longest_row_costs += cost[micro_step * n_ranks]
        micro_step += 1
        # The longest rows that the bins of these micro-steps hold, the last one in part.
        room = micro_step * n_ranks * token_budget
        while filled < n_rows and held_tokens + tokens[filled] <= room:
            held_tokens += tokens[filled]
            held += cost[filled]
            filled += 1
        part = cost[filled] * (room - held_tokens) / tokens[filled] if filled < n_rows else 0
        bound = max(bound, longest_row_costs + int((total - held - part) / n_ranks))
    return bound
