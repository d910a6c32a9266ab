"""Advantages of a batch: which rows count as samples, and what the others get.

verl's driver functions divide by the rows that they get. Among these, a row without a trained token
is a KL of 0, a perplexity of 1, and one more sample of its prompt; so they get the others alone.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from verl_padding.driver.advantages import (
    READ,
    RESULTS,
    REWARDS,
    SCORES,
    compute_grpo_advantages,
    compute_row_advantages,
    estimator_for_any_rows,
    session_advantages,
)
from verl_padding.driver.agent_roles import parts_by_role, read_roles
from verl_padding.driver.planned_update import PlannedUpdate
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.queue import (
    KVBatchMeta,
    jagged,
    put_columns,
    read_fields,
    rows_like,
    select_rows,
    tokens_of_masks,
)
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.plan.row_keys import rows_of_sessions
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.prefix_sharing.repeated_tokens import MASK

WEIGHTS = "rollout_is_weights"


def compute_advantages(
    batch: KVBatchMeta,
    metrics: dict[str, Any],
    by_verl: Callable[[KVBatchMeta, dict[str, Any]], KVBatchMeta],
    job: VerlJob,
    update: PlannedUpdate | None,
) -> KVBatchMeta:
    """Advantages by ``_compute_advantage`` of verl's trainer, of rows that have a trained token;
    those of sessions and of roles, where they are asked for, and of sessions whose last row is not
    trained.

    Args:
        update: the one that runs.
    """
    algorithm, by_role = job.config.algorithm, job.padding.baseline == "role"
    by_session = job.padding.advantages == "session"
    trained = [row for row, tokens in enumerate(tokens_of_masks(batch, MASK)) if tokens]
    is_stock = not by_session and not by_role and len(trained) == len(batch)
    if is_stock:
        batch = by_verl(batch, metrics)
    elif trained:
        # All of its results but advantages are kept: KL penalties, weights, what is rejected.
        with estimator_for_any_rows(algorithm):
            computed = by_verl(select_rows(batch, trained), metrics)
        batch = rows_like(computed, batch.keys, batch.tags)
    put_results_of_untrained(batch, trained)
    parent_R: list[int | None] = [None] * len(batch)
    if by_session:
        # A trainer of one's own may have made another batch of its rows.
        if update is not None and update.batch.keys == batch.keys:
            parent_R = update.prefixes.parent_R
        else:
            parent_R = PrefixDetection(batch, may_have_images=job.has_images).parent_R
    parts = [(batch, parent_R)]
    if by_role:
        role_R = read_roles(batch.keys, batch.partition_id)
        parts = list(parts_by_role(batch, role_R, parent_R))
    trained_keys = {batch.keys[row] for row in trained}
    for part, continued in parts:
        if by_session:
            rows = read_fields(part.keys, part.partition_id, READ)
            tokens_R = tokens_of_tags(part.tags)
            advantages = session_advantages(rows, part.keys, tokens_R, continued, algorithm)
            put_columns(part, advantages)
        elif algorithm.adv_estimator == "grpo":
            compute_grpo_advantages(part, algorithm, trained_keys, has_verls=is_stock)
        elif not is_stock:
            trained_rows = [row for row, key in enumerate(part.keys) if key in trained_keys]
            samples = select_rows(part, rows_counted_as_samples(part.keys, trained_rows))
            compute_row_advantages(samples, algorithm)
    return batch


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
