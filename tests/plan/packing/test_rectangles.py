"""Layouts for engines that pad rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plan_oracles import reporting_ranks
from verl_padding.plan import Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.cost import attention_cost

PAD_TOKENS = 2


@st.composite
def calls(draw):
    multiple = draw(st.integers(1, 3))
    fixed = draw(st.booleans())
    return {
        "dp_size": draw(st.integers(1, 5)),
        "padded_to": draw(st.sampled_from(["micro_batch", "local_batch"])),
        "sync_point": draw(st.sampled_from(["mini_batch", "micro_batch"])),
        "token_budget": None if fixed else draw(st.sampled_from([500, 1200, 5000])),
        "micro_batch_multiple": draw(st.integers(1, 3)),
        "micro_batch_rows": multiple if fixed else 1,
    }


@settings(max_examples=80)
@given(
    tokens=st.lists(st.integers(1, 500), min_size=1, max_size=80),
    steps=st.integers(1, 4),
    call=calls(),
)
def test_what_is_computed_holds_the_budget_and_a_layouts_promises(tokens, steps, call):
    update = Update(prompts_per_mini_batch=1, **call)
    job = Job(
        strategy="rows",
        prompts=steps,
        sessions_per_prompt=1,
        updates={"actor": update},
        inference={"pass": Pass(**call)},
        packer="plan",
        pad_tokens=PAD_TOKENS,
    )
    rows = Rows.from_keys([f"{row}_0_0" for row in range(len(tokens))], tokens)
    plan = plan_batch(rows, job)
    for name, layout in plan.layouts.items():
        all_tokens = [*tokens, *[PAD_TOKENS] * layout.n_pads]
        assert sorted(layout.order) == list(range(len(all_tokens)))
        multiple = update.local_batch_multiple
        for size, real in zip(layout.local_batch_rows_M, layout.real_rows_M, strict=True):
            assert size == -(-real // (update.dp_size * multiple)) * multiple  # as small as can be
        enough_M = [min(real, update.dp_size) for real in layout.real_rows_M]
        assert reporting_ranks(layout) == enough_M
        slowest = total = 0
        for rows_DK in layout.rows_MDK:
            assert len(rows_DK[0]) % update.micro_batch_multiple == 0
            load_D = []
            for blocks in rows_DK:
                n_rows_K = [*map(len, blocks)]
                longest_K = [max(all_tokens[row] for row in block) for block in blocks]
                if update.padded_to == "local_batch":
                    longest_K = [max(longest_K)] * len(blocks)
                if update.token_budget is None:
                    assert set(n_rows_K) == {update.micro_batch_rows}
                else:
                    assert np.multiply(n_rows_K, longest_K).max() <= update.token_budget
                load_D.append(int(np.dot(n_rows_K, attention_cost(np.array(longest_K)))))
            slowest, total = slowest + max(load_D), total + sum(load_D)
        figures = plan.figures[name]
        assert figures.imbalance >= 1
        if update.padded_to == "local_batch":
            assert figures.imbalance == pytest.approx(slowest * update.dp_size / total)
            if min(tokens) >= PAD_TOKENS:
                # One rank pads its local mini-batch to the longest row: no layout is faster.
                longest_M = [max(tokens[row] for row in held) for held in layout.rows_M]
                assert slowest == sum(
                    layout.local_batch_rows_M * attention_cost(np.array(longest_M))
                )
