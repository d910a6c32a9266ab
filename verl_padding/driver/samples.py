"""Rows that count where something is divided by rows.

verl's driver functions divide by the rows that they get. Among these, a row without a trained token
is a KL of 0, a perplexity of 1, and one more sample of its prompt; so they get the others alone.
"""

from collections.abc import Collection, Sequence

import torch

from verl_padding.config import PaddingConfig
from verl_padding.driver.advantages import MASK, RESULTS, REWARDS, SCORES
from verl_padding.pads.columns import jagged
from verl_padding.pads.queue import (
    KVBatchMeta,
    put_columns,
    read_fields,
    select_rows,
    tokens_of_masks,
)
from verl_padding.plan.row_keys import rows_of_sessions

WEIGHTS = "rollout_is_weights"


def rows_that_train(batch: KVBatchMeta) -> list[int]:
    """Numbers of the rows that have a trained token."""
    return [row for row, tokens in enumerate(tokens_of_masks(batch, MASK)) if tokens]


def rows_counted_as_samples(keys: Sequence[str], trained: Collection[int]) -> list[int]:
    """Numbers of the rows that are samples: those that train, and the last of a session in which
    none does, for its outcome is one of its prompt.

    >>> rows_counted_as_samples(["p_0_0", "p_0_1", "p_1_0", "p_1_1"], [0])
    [0, 3]
    """
    unused = (rows for rows in rows_of_sessions(keys) if not any(r in trained for r in rows))
    return sorted({*trained, *(rows[-1] for rows in unused)})


def put_results_of_untrained(batch: KVBatchMeta, trained: Sequence[int]) -> None:
    """Gives the rows that do not train the fields that verl's trainer has given the ``trained``:
    advantages of 0, and rewards without a penalty."""
    rest = sorted({*range(len(batch))} - {*trained})
    if not rest:
        return
    untrained = select_rows(batch, rest)
    scores = read_fields(untrained.keys, batch.partition_id, [SCORES])[SCORES].unbind()
    dtype_of = dict.fromkeys(RESULTS, scores[0].dtype)
    if trained:
        names = (*RESULTS, REWARDS, WEIGHTS)
        like = read_fields([batch.keys[trained[0]]], batch.partition_id, names)
        dtype_of = {name: like[name].dtype for name in names if name in like}
    columns = {}
    for name, dtype in dtype_of.items():
        values = scores if name == REWARDS else map(torch.zeros_like, scores)
        columns[name] = jagged(value.to(dtype) for value in values)
    put_columns(untrained, columns)


def sample_unit(keys: Sequence[str], padding: PaddingConfig) -> str:
    """Says of sessions with several rows that each row is a sample to the job; "" where none is,
    or sessions have one row."""
    by_row = [
        f"padding.{name}" for name in ("advantages", "weighting") if getattr(padding, name) == "row"
    ]
    if not by_row or len(rows_of_sessions(keys)) == len(keys):
        return ""
    rows, sessions = (
        " and ".join(f"{name}={unit}" for name in by_row) for unit in ("row", "session")
    )
    return (
        f"sessions have several rows, and each row counts as a sample, by {rows}. Where the rows "
        f"of a session are one rollout with one reward, set {sessions} (docs/sessions.md)."
    )
