"""A sampled token that several rows of a session have is trained in the first of them alone.

Example:
    An agent loop returns a row for each snapshot of a conversation, with all answers so far in its
    response: ``p_0_0`` is [5 | 6], ``p_0_1`` is [5 | 6 7 8], where the tool's 7 has no loss. Both
    train the 6 behind [5]. Trained once, ``p_0_1`` keeps the 8 alone.

Equal tokens behind different beginnings are different samples. So are those of rows of which an
agent loop says that neither goes on from the other
(:data:`~verl_padding.prefix_sharing.detection.EXTENDS`), though they begin alike.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from verl_padding.pads.queue import KVBatchMeta, put_columns, read_fields, rows_like
from verl_padding.plan.cost import Int64s
from verl_padding.plan.row_keys import index_of_key, rows_of_sessions, session_of_key
from verl_padding.prefix_sharing.detection import PrefixDetection

MASK, LOSS_MASK = "response_mask", "loss_mask"


def mask_repeated_tokens(batch: KVBatchMeta, prefixes: PrefixDetection) -> int:
    """Takes tokens that an earlier row of their session trains out of the masks of the batch's rows
    in TransferQueue; returns how many."""
    fields = read_fields(batch.keys, batch.partition_id, [MASK, LOSS_MASK])
    mask_R = fields[MASK].unbind()
    repeated = repeated_tokens(batch.keys, mask_R, prefixes)
    if repeated:
        rows = list(repeated)
        columns = {
            name: torch.nested.as_nested_tensor(
                [values[row] * ~repeated[row] for row in rows], layout=torch.jagged
            )
            for name, values in ((name, fields[name].unbind()) for name in (MASK, LOSS_MASK))
        }
        keys, tags = [batch.keys[row] for row in rows], [batch.tags[row] for row in rows]
        put_columns(rows_like(batch, keys, tags), columns)
    return sum(int(again.sum()) for again in repeated.values())


def repeated_tokens(
    keys: Sequence[str], mask_R: Sequence[torch.Tensor], prefixes: PrefixDetection
) -> dict[int, torch.Tensor]:
    """Of each row that trains a token again: which tokens of its response, (response,).

    Args:
        mask_R: which tokens of its response each row trains, (response,) each.
    """
    found = {}
    for session in rows_of_sessions(keys):
        if len(session) == 1:
            continue
        number_R = dict(_numbered(keys, session, prefixes))
        is_trained = np.zeros(sum(map(len, number_R.values())), dtype=np.bool_)
        for row in session:
            mask = mask_R[row].bool().numpy()
            numbers = number_R[row][len(number_R[row]) - len(mask) :]
            again = mask & is_trained[numbers]
            is_trained[numbers[mask]] = True
            if again.any():
                found[row] = torch.from_numpy(again)
    return found


def _numbered(
    keys: Sequence[str], session: Sequence[int], prefixes: PrefixDetection
) -> Iterator[tuple[int, Int64s]]:
    """Each row of a session with a number for each of its tokens, (tokens,): the same for the same
    token after the same prefix."""
    # [5, 8], [5, 6, 7] and [5, 6], in the order of their tree, get the numbers 0 1, 0 3 4 and 0 3.
    forest = prefixes.by_samples
    tokens_R = forest.tokens_R
    if session_of_key(keys[session[0]]) in prefixes.declaring:
        # What a row continues has a smaller index.
        rows = sorted(session, key=lambda row: index_of_key(keys[row]))
        earlier_I = [prefixes.continued_R[row] for row in rows]
        shared_I = [0 if row is None else int(tokens_R[row]) for row in earlier_I]
    else:
        order, shared = forest.shared_among(np.array(session))
        rows, shared_I = [session[place] for place in order], shared.tolist()
        earlier_I = [None, *rows[:-1]]
    number_R: dict[int, Int64s] = {}
    n_tokens = 0
    for row, earlier, n_shared in zip(rows, earlier_I, shared_I, strict=True):
        number_R[row] = np.arange(n_tokens, n_tokens + tokens_R[row])
        n_tokens += len(number_R[row])
        if earlier is not None:
            number_R[row][:n_shared] = number_R[earlier][:n_shared]
        yield row, number_R[row]
