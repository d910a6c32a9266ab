"""Runs of rows of a trie, and what they take of a token budget."""

import pytest

from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.plan.prefix_tries import PrefixTries


@pytest.mark.parametrize(
    ("prompt", "sessions", "budget", "least", "multiple", "n_rows_K"),
    [
        (100, 64, 2048, 1, 1, [64]),  # 110 + 63 x 11 tokens
        (100, 64, 2048, 128, 1, [16, 16, 16, 16]),  # 110 + 15 x 128
        (100, 64, 352, 1, 16, [16, 16, 16, 16]),  # 112 + 15 x 16
        # All fit into one micro-batch if nothing is shared: 200 x 20 tokens.
        (10, 200, 4096, 128, 1, [32, 32, 32, 32, 32, 32, 8]),
    ],
)
def test_rows_that_branch_take_no_less_of_the_budget_than_is_said(
    prompt, sessions, budget, least, multiple, n_rows_K
):
    """Rollouts of ten tokens, of one prompt."""
    tokens = [prompt + 10] * sessions
    tries = PrefixTries.in_order(tokens, range(sessions), [0, *[prompt] * (sessions - 1)])
    rows = Rows.from_keys([f"a_{session}_0" for session in range(sessions)], tokens, tries=tries)
    update = Update(
        dp_size=1,
        token_budget=budget,
        prompts_per_mini_batch=1,
        min_branch_tokens=least,
        token_multiple=multiple,
    )
    job = Job(
        strategy="prompt",
        prompts=1,
        sessions_per_prompt=sessions,
        updates={"actor": update},
        inference={},
        packer="plan",
        sharing="on",
    )
    layout = plan_batch(rows, job).layouts["actor"]
    assert list(map(len, layout.rows_MDK[0][0])) == n_rows_K
