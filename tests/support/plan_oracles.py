"""Slow and obvious oracles of plans of drawn jobs, and a count of what the draws have met."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from tests.support.drawn_jobs import batches, computed_once, jobs
from verl_padding.plan import Layout, plan_batch

EXAMPLES = settings(max_examples=40)


MOSTLY_CUT_BY_PLAN = st.one_of(
    st.tuples(batches(), jobs()),
    st.tuples(batches(), jobs(pass_cut_as_update=True)),
    st.tuples(
        batches(max_prompts=2, max_rows=8, known="tries"),
        jobs(pass_cut_as_update=True, sharing="on"),
    ),
)
"""Rows and their job. Many of these share prefixes, too."""


met = Counter()
"""What the examples have met, so that no promise passes because nothing was asked of it."""
OFTEN = ("pads", "steps", "two updates", "shared prefixes")
"""What one plan in fifty has met at least."""


def none_is_vacuous(often, now_and_then):
    """For a fixture of a module: its examples meet each several times as often, whatever the
    seed."""
    met.clear()
    yield
    least = dict.fromkeys(often, 1 / 50) | dict.fromkeys(now_and_then, 1 / 200)
    for what, share in least.items():
        assert met[what] >= met["plans"] * share, (what, met)


def planned(rows, job):
    plan = plan_batch(rows, job)
    met["plans"] += 1
    met["pads"] += plan.n_pads
    met["steps"] += sum(plan.layouts[name].n_mini_batches for name in job.updates)
    met["two updates"] += len(job.updates) > 1
    met["fewer steps"] += bool(plan.warnings)
    met["shared prefixes"] += any(figures.sharing_factor > 1 for figures in plan.figures.values())
    return plan


def layout_of_local_batches(n_rows, local_batches):
    """Of local mini-batches by mini-batch and rank, which verl's packer cuts."""
    rows_MDK = tuple(
        tuple((local_batch,) for local_batch in local_batches_D)
        for local_batches_D in local_batches
    )
    return Layout(n_rows=n_rows, rows_MDK=rows_MDK, cut_by="verl")


def held_M(layout):
    """Real rows of each mini-batch that are computed, over all ranks."""
    return [
        [row for local_batch in ranks for row in local_batch if row < layout.n_rows]
        for ranks in layout.local_batches
    ]


def reporting_ranks(layout):
    """Ranks that hold a real row, in each mini-batch."""
    return [
        sum(min(local_batch) < layout.n_rows for local_batch in ranks)
        for ranks in layout.local_batches
    ]


def leaves(rows, job, call, held):
    """Of the rows of a micro-batch, pads and those that no row which goes on from all of them is
    beside."""
    if job.sharing == "off" or call.token_budget is None:
        return list(held)
    beginnings = {shorter for row in held if row < len(rows) for shorter in _beginnings(rows, row)}
    return [row for row in held if row not in beginnings]


def _beginnings(rows, row):
    """The rows that are computed in a row: all that it begins with, but for equal ones before it
    among the tries."""
    if rows.text_R is None or rows.tries is None:
        return []
    text, by_place = rows.text_R[row], np.argsort(rows.tries.dfs_position_R).tolist()
    after = by_place[by_place.index(row) + 1 :]
    return [other for other in after if rows.text_R[other] == text[: rows.tokens_R[other]]]


def computed(rows, job, call, held):
    """Positions, from 1, of the tokens that the engine computes of a micro-batch."""
    alone = leaves(rows, job, call, held)
    once = []
    if (
        job.sharing == "on"
        and call.token_budget is not None
        and rows.text_R is not None
        and not rows.whole
    ):
        once = computed_once([rows.text_R[row] for row in held if row < len(rows)])
        met["rows that branch"] += len(once) < sum(
            rows.tokens_R[row] for row in alone if row < len(rows)
        )
        alone = [row for row in alone if row >= len(rows)]
    ends = [rows.tokens_R[row] if row < len(rows) else job.pad_tokens for row in alone]
    return [*once, *[position for end in ends for position in range(1, end + 1)]]


def used(rows, job, call, held):
    """Tokens that a micro-batch takes of the token budget where rows share: what it computes, of
    rows that branch whole multiples, and no less than is said of each; or an eighth of what it
    gathers, if that is more."""
    assert rows.text_R is not None
    real = [row for row in leaves(rows, job, call, held) if row < len(rows)]
    # The longer of two rows that begin alike comes first, and the other one branches off it.
    taken, before = 0, ()
    for text in sorted((rows.text_R[row] for row in real), reverse=True):
        shared = sum(a == b for a, b in zip(before, text, strict=False))
        parts = len(text) - shared + 1
        met["rows that branch"] += shared >= 2
        filled = -(-parts // call.token_multiple) * call.token_multiple
        taken += max(filled, call.min_branch_tokens) if shared >= 2 else len(text)
        before = text
    gathered = sum(rows.tokens_R[row] for row in real)
    return max(taken, -(-gathered // 8)) + sum(row >= len(rows) for row in held) * job.pad_tokens
