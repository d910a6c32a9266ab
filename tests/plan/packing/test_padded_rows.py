"""Engines that pad rows: against every way there is on small mini-batches, and beside verl's own
layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plan_oracles import reporting_ranks
from verl_padding.plan import COST_MODELS, Job, Pass, Rows, Update, plan_batch

EXAMPLES = settings(max_examples=80)
attention_cost = COST_MODELS["attention"]
PAD_TOKENS = 2


def planned_calls(
    tokens: list[int], steps: int, update: Update, strategy="rows", sessions=1, inference=None
):
    job = Job(
        strategy=strategy,
        prompts=steps,
        sessions_per_prompt=sessions,
        updates={"actor": update},
        inference=inference or {},
        packer="plan",
        pad_tokens=PAD_TOKENS,
    )
    return plan_batch(Rows.from_keys([f"{row}_0_0" for row in range(len(tokens))], tokens), job)


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


@EXAMPLES
@given(
    tokens=st.lists(st.integers(1, 500), min_size=1, max_size=80),
    steps=st.integers(1, 4),
    call=calls(),
)
def test_what_is_computed_holds_the_budget_and_a_layouts_promises(tokens, steps, call):
    update = Update(prompts_per_mini_batch=1, **call)
    plan = planned_calls(tokens, steps, update, inference={"pass": Pass(**call)})
    for name, layout in plan.layouts.items():
        all_tokens = [*tokens, *[PAD_TOKENS] * layout.n_pads]
        assert sorted(layout.order) == list(range(len(all_tokens)))
        multiple = update.local_batch_multiple
        for size, real in zip(layout.local_batch_rows_M, layout.real_rows_M, strict=True):
            assert size == -(-real // (update.dp_size * multiple)) * multiple  # as small as can be
        slowest = total = 0
        for mini_batch in range(layout.n_mini_batches):
            assert reporting_ranks(layout)[mini_batch] == min(
                layout.real_rows_M[mini_batch], update.dp_size
            )
            by_rank = [layout.rows_MDK[mini_batch][rank] for rank in range(update.dp_size)]
            assert len({len(blocks) for blocks in by_rank}) == 1
            assert len(by_rank[0]) % update.micro_batch_multiple == 0
            load_D = []
            for blocks in by_rank:
                local_batch = max(all_tokens[row] for block in blocks for row in block)
                longest_K = [max(all_tokens[row] for row in block) for block in blocks]
                if update.padded_to == "local_batch":
                    longest_K = [local_batch] * len(blocks)
                for block, longest in zip(blocks, longest_K, strict=True):
                    assert (
                        update.token_budget is None or len(block) * longest <= update.token_budget
                    )
                    assert update.token_budget is not None or len(block) == update.micro_batch_rows
                costs = attention_cost(np.array(longest_K))
                load_D.append(
                    sum(len(block) * int(c) for block, c in zip(blocks, costs, strict=True))
                )
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
