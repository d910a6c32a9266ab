"""Rows that are refused, each by its key."""

import pytest

from verl_padding.plan import PlanError, Rows


@pytest.mark.parametrize("key", ["plain", "a_b", "a_0_x", "a_x_0", "_0_0", "a_-1_0", "a_0_1.5"])
def test_a_key_of_another_form_is_refused_by_name(key):
    with pytest.raises(
        PlanError, match=r"not of the form \{uid\}_\{session\}_\{index\}"
    ) as refusal:
        Rows.from_keys(["a_0_0", key], [3, 3])
    assert repr(key) in str(refusal.value)


@pytest.mark.parametrize(
    "tokens", [None, float("inf"), float("nan"), 7.9, 8.0, "8", 0, -1, True, 2**26 + 1, 2**70]
)
def test_a_row_without_a_whole_number_of_tokens_is_refused_with_it(tokens):
    with pytest.raises(
        PlanError, match=r"^row 'b_0_0' has .* tokens: a whole number from 1 to 67108864"
    ) as refusal:
        Rows.from_keys(["a_0_0", "b_0_0"], [3, tokens])
    assert f"has {tokens!r} tokens" in str(refusal.value)
