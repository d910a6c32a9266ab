"""Random batches and jobs for the planner's properties."""

import dataclasses

from hypothesis import strategies as st

from verl_padding.plan import STRATEGIES, Job, Pass, Rows, Update
from verl_padding.plan.calls import Call
from verl_padding.plan.row_keys import session_of_key


@st.composite
def batches(draw, max_prompts: int = 12, max_sessions: int = 3, max_rows: int = 4) -> Rows:
    """1 to ``max_prompts`` prompts, some sessions missing, 1 to ``max_rows`` rows a session, in any order.

    In most batches it is known which rows extend others: chains, and some branches.
    """
    n_prompts = draw(st.integers(1, max_prompts))
    keys = []
    for prompt in range(n_prompts):
        n_rows = draw(st.lists(st.integers(0, max_rows), min_size=1, max_size=max_sessions))
        keys += [f"p{prompt}_{session}_{index}" for session, n in enumerate(n_rows) for index in range(n)]
    if not keys:
        keys = ["p0_0_0"]
    keys = draw(st.permutations(keys))
    tokens = draw(st.lists(st.integers(2, 400), min_size=len(keys), max_size=len(keys)))
    if not draw(st.sampled_from([True, True, True, False])):
        return Rows.from_keys(keys, tokens)
    # How many places before a row, by length, the one stands that it extends; 0 for none.
    back = draw(st.lists(st.sampled_from([1, 1, 1, 0, 2]), min_size=len(keys), max_size=len(keys)))
    extends: list[int | None] = [None] * len(keys)
    by_session: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=lambda row: (tokens[row], row)):
        before = by_session.setdefault(session_of_key(keys[row]), [])
        if 0 < back[row] <= len(before):
            extends[row] = before[-back[row]]
        before.append(row)
    return Rows.from_keys(keys, tokens, extends)


@st.composite
def jobs(draw, strategies=tuple(STRATEGIES), pass_cut_as_update: bool = False) -> Job:
    """Any job that fits batches of up to 12 prompts and 400 tokens a row; few have a pass that is cut as its update."""
    strategy = draw(st.sampled_from(strategies))
    prompts = draw(st.sampled_from([12, 24]))
    sessions = draw(st.integers(1, 4))

    def call(kind, **fields):
        dp_size, multiple = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        budget = draw(st.sampled_from([400, 1000] if pass_cut_as_update else [None, 400, 1000]))
        if kind is Update and strategy == "lcm":
            # verl's fixed size must divide by the ranks and the micro-batch.
            size = fields["prompts_per_mini_batch"] * sessions
            dp_size = draw(st.sampled_from([d for d in range(1, 5) if size % d == 0]))
            multiple = draw(st.sampled_from([c for c in range(1, 4) if size // dp_size % c == 0]))
        shape = {"micro_batch_rows": multiple} if budget is None else {"micro_batch_multiple": multiple}
        meet = draw(st.sampled_from(["mini_batch", "micro_batch"]))
        return kind(dp_size=dp_size, token_budget=budget, sync_point=meet, **shape, **fields)

    updates = {
        name: call(
            Update, prompts_per_mini_batch=draw(st.sampled_from([1, 2, 3, 4, 6, 12])), shuffle=draw(st.booleans())
        )
        for name in draw(st.sampled_from([("actor",), ("actor", "critic")]))
    }
    names = draw(st.sampled_from([("log_prob",), ("log_prob", "values")] + [()] * (not pass_cut_as_update)))
    inference = {name: call(Pass, as_update="actor" if name == "log_prob" else None) for name in names}
    if pass_cut_as_update or (inference and draw(st.booleans())):
        # A pass that is cut by the rules of the update, as most are.
        shared = {field.name: getattr(updates["actor"], field.name) for field in dataclasses.fields(Call)}
        shared["sync_point"] = draw(st.sampled_from(["mini_batch", "micro_batch"]))
        inference["log_prob"] = Pass(as_update="actor", **shared)
    packer = "plan" if pass_cut_as_update else draw(st.sampled_from(["verl", "plan"]))
    return Job(
        strategy=strategy,
        prompts=prompts,
        sessions_per_prompt=sessions,
        updates=updates,
        inference=inference,
        row_multiple=draw(st.sampled_from([1, 1, 3, 10])),
        seed=draw(st.integers(0, 3)),
        packer=packer,
        sharing=draw(st.sampled_from(["chains", "chains", "off"])) if packer == "plan" else "off",
        cost_model=draw(st.sampled_from(["tokens", "attention"])),
    )
