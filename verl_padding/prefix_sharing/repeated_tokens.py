"""A sampled token that several rows of a session have is trained in the first of them alone.

Example:
    An agent loop returns a row for each snapshot of a conversation, with all answers so far in its
    response: ``p_0_0`` is [5 | 6], ``p_0_1`` is [5 | 6 7 8], where the tool's 7 has no loss. Both
    train the 6 behind [5]. Trained once, ``p_0_1`` keeps the 8 alone.

Equal tokens behind different beginnings are different samples. So are those of rows of which an
agent loop says that neither extends the other
(:data:`~verl_padding.prefix_sharing.detection.EXTENDS`), though they begin alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from verl_padding.pads.queue import KVBatchMeta, jagged, put_columns, read_fields, select_rows
from verl_padding.plan.cost import Int64s
from verl_padding.plan.row_keys import rows_of_sessions, session_of_key
from verl_padding.prefix_sharing.detection import PrefixDetection

MASK, LOSS_MASK = "response_mask", "loss_mask"


def mask_repeated_tokens(batch: KVBatchMeta, prefixes: PrefixDetection) -> int:
    """Takes tokens that an earlier row of their session trains out of the masks of the batch's rows
    in TransferQueue; returns how many."""
    fields = read_fields(batch.keys, batch.partition_id, [MASK, LOSS_MASK])
    mask_R = fields[MASK].unbind()
    repeated = repeated_tokens(batch.keys, mask_R, prefixes)
    if repeated:
        columns = {}
        for name in (MASK, LOSS_MASK):
            values = fields[name].unbind()
            columns[name] = jagged(values[row] * ~again for row, again in repeated.items())
        put_columns(select_rows(batch, list(repeated)), columns)
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
        number_I = number_tokens(
            prefixes.by_samples.tokens_R[session], _shared(keys, session, prefixes)
        )
        is_trained = np.zeros(sum(map(len, number_I)), dtype=np.bool_)
        for row, numbers in zip(session, number_I, strict=True):
            mask = mask_R[row].bool().numpy()
            response_numbers = numbers[len(numbers) - len(mask) :]
            again = mask & is_trained[response_numbers]
            is_trained[response_numbers[mask]] = True
            if again.any():
                found[row] = torch.from_numpy(again)
    return found


def number_tokens(
    tokens_R: Sequence[int] | Int64s, shared: Iterable[tuple[int, int, int]]
) -> list[Int64s]:
    """A number for each token of each row, (tokens,), the same for tokens that rows share.

    Args:
        shared: a row, another one, and how many of their first tokens they share; what the other
            one shares itself comes before.
    """
    # [5, 8], [5, 6, 7] and [5, 6], each sharing with the one before, are 0 1, 0 3 4 and 0 3.
    number_R = np.split(np.arange(sum(tokens_R)), np.cumsum(tokens_R)[:-1])
    for row, other, n_shared in shared:
        number_R[row][:n_shared] = number_R[other][:n_shared]
    return number_R


def _shared(
    keys: Sequence[str], session: Sequence[int], prefixes: PrefixDetection
) -> Iterator[tuple[int, int, int]]:
    """Places in a session of two rows, and how many tokens they share that are the same
    samples."""
    if session_of_key(keys[session[0]]) in prefixes.declaring:
        # What a row extends has a smaller index.
        for place, row in enumerate(session):
            if (parent := prefixes.parent_R[row]) is not None:
                yield place, session.index(parent), int(prefixes.by_samples.tokens_R[parent])
        return
    order, shared_I = prefixes.by_samples.shared_among(np.array(session))
    for (before, place), n_shared in zip(pairwise(order), shared_I[1:], strict=True):
        yield int(place), int(before), int(n_shared)
