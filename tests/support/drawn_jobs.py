"""Random batches and jobs for the planner's properties."""

import dataclasses
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from verl_padding.plan import STRATEGIES, Job, Pass, Rows, Update
from verl_padding.plan.calls import Call
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import parts_of_key

MAX_TOKENS = 400
"""Of a row."""
Text = tuple[tuple[int, int], ...]
"""Tokens that tell all tokens before them: (row that has it first, position from 1)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnRows(Rows):
    text_R: tuple[Text, ...] | None = None
    """Tokens of each row, if its tries are known."""
    whole: bool = False
    """Whether rows share all of a row or nothing."""


def computed_once(texts):
    """Positions of the tokens that are computed where rows share what they begin with: each token
    of a trie, and once more the last one before each further branch."""
    tokens = {token for text in texts for token in text}
    edges = {edge for text in texts for edge in pairwise(text)}
    branched = [before for before, _ in edges]
    for token in set(branched):
        branched.remove(token)
    return [position for _, position in [*tokens, *branched]]


@st.composite
def batches(
    draw,
    max_prompts=12,
    max_sessions=3,
    max_rows=4,
    known=None,
    max_tokens=MAX_TOKENS,
):
    """1 to ``max_prompts`` prompts, some sessions missing, 1 to ``max_rows`` rows a session, in any
    order.

    It is ``known`` what rows of a prompt begin with ("tries"), which of them begin with all of
    another one ("whole"), or "nothing"; by default any of these.
    """
    n_prompts = draw(st.integers(1, max_prompts))
    keys = []
    for prompt in range(n_prompts):
        n_rows = draw(st.lists(st.integers(0, max_rows), min_size=1, max_size=max_sessions))
        keys += [
            f"p{prompt}_{session}_{index}" for session, n in enumerate(n_rows) for index in range(n)
        ]
    if not keys:
        keys = ["p0_0_0"]
    keys = draw(st.permutations(keys))
    tokens = draw(st.lists(st.integers(2, max_tokens), min_size=len(keys), max_size=len(keys)))
    known = known or draw(st.sampled_from(["tries", "whole", "nothing", "whole", "tries"]))
    if known == "nothing":
        return DrawnRows.from_keys(keys, tokens)
    rows = _growing_from_each_other(keys, tokens, Random(draw(st.integers(0, 2**32))))
    if known == "tries":
        return rows
    assert rows.tries is not None
    tries = dataclasses.replace(rows.tries, whole_rows_only=True)
    return dataclasses.replace(rows, tries=tries, whole=True)


def tries_of_chains(tokens_R, chain_R):
    """Of rows that are one chain, the longer ones begin with all of the shorter ones; others share
    nothing."""
    order = sorted(range(len(tokens_R)), key=lambda row: (chain_R[row], -tokens_R[row], -row))
    shared_I = [
        0,
        *[
            tokens_R[row] if chain_R[row] == chain_R[before] else 0
            for before, row in pairwise(order)
        ],
    ]
    return PrefixTries.in_order(tokens_R, order, shared_I)


def _growing_from_each_other(keys, tokens, random):
    """Each row begins with some of the tokens of a row of its prompt before it, with all, or with
    none."""
    texts = []
    prompt_texts = {}
    for row, (key, length) in enumerate(zip(keys, tokens, strict=True)):
        earlier = prompt_texts.setdefault(parts_of_key(key)[0], [])
        text = random.choice([(), *earlier])
        shared = text[
            : random.choice([0, 1, 2, len(text), *random.choices(range(len(text) + 1), k=4)])
        ][:length]
        texts.append(
            shared + tuple((row, position) for position in range(len(shared) + 1, length + 1))
        )
        earlier.append(texts[-1])
    order = sorted(range(len(keys)), key=texts.__getitem__, reverse=True)
    shared_I = [
        0,
        *[
            sum(a == b for a, b in zip(texts[one], texts[next_], strict=False))
            for one, next_ in pairwise(order)
        ],
    ]
    rows = DrawnRows.from_keys(keys, tokens, tries=PrefixTries.in_order(tokens, order, shared_I))
    return dataclasses.replace(rows, text_R=tuple(texts))


@st.composite
def jobs(draw, strategies=tuple(STRATEGIES), pass_cut_as_update=False, sharing=None):
    """Any job that fits batches of up to 12 prompts and 400 tokens a row; few have a pass that is
    cut as its update."""
    strategy = draw(st.sampled_from(strategies))
    sessions = draw(st.integers(1, 4))

    def call(kind, **fields):
        dp_size, multiple = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        budget = draw(st.sampled_from([400, 1000] if pass_cut_as_update else [None, 400, 1000]))
        if kind is Update and strategy == "lcm":
            # verl's fixed size must divide by the ranks and the micro-batch.
            size = fields["prompts_per_mini_batch"] * sessions
            dp_size = draw(st.sampled_from([d for d in range(1, 5) if size % d == 0]))
            multiple = draw(st.sampled_from([c for c in range(1, 4) if size // dp_size % c == 0]))
        shape = (
            {"micro_batch_rows": multiple} if budget is None else {"micro_batch_multiple": multiple}
        )
        meet = draw(st.sampled_from(["mini_batch", "micro_batch"]))
        return kind(dp_size=dp_size, token_budget=budget, sync_point=meet, **shape, **fields)

    updates = {
        name: call(
            Update,
            prompts_per_mini_batch=draw(st.sampled_from([1, 2, 3, 4, 6, 12])),
            shuffle=draw(st.booleans()),
        )
        for name in draw(st.sampled_from([("actor",), ("actor", "critic")]))
    }
    names = draw(
        st.sampled_from([("log_prob",), ("log_prob", "values")] + [()] * (not pass_cut_as_update))
    )
    inference = {
        name: call(Pass, as_update="actor" if name == "log_prob" else None) for name in names
    }
    if pass_cut_as_update or (inference and draw(st.booleans())):
        # A pass that is cut by the rules of the update, as most are.
        shared = {
            field.name: getattr(updates["actor"], field.name) for field in dataclasses.fields(Call)
        }
        shared["sync_point"] = draw(st.sampled_from(["mini_batch", "micro_batch"]))
        inference["log_prob"] = Pass(as_update="actor", **shared)
    packer = "plan" if pass_cut_as_update else draw(st.sampled_from(["verl", "plan"]))
    return Job(
        strategy=strategy,
        optimizer_steps=draw(st.sampled_from(["configured", "by_rows"])),
        prompts=draw(st.sampled_from([12, 24])),
        sessions_per_prompt=sessions,
        updates=updates,
        inference=inference,
        row_multiple=draw(st.sampled_from([1, 1, 3, 10])),
        seed=draw(st.integers(0, 3)),
        packer=packer,
        sharing=sharing
        or (draw(st.sampled_from(["on", "on", "off"])) if packer == "plan" else "off"),
        pad_tokens=draw(st.sampled_from([2, 2, 2, 30, 250])),
        cost_model=draw(st.sampled_from(["tokens", "attention"])),
    )
