"""What worker calls require of rows, and what they are refused for."""

import pytest

from verl_padding.plan import Pass, PlanError


def test_a_size_below_one_is_refused_by_the_name_of_its_setting():
    with pytest.raises(PlanError, match=r"^ref.max_tokens=0: "):
        Pass(dp_size=1, token_budget=0, budget_setting="ref.max_tokens")


@pytest.mark.parametrize("name", ["sync_point", "padded_to"])
def test_a_choice_that_there_is_not_is_refused_with_those_there_are(name):
    with pytest.raises(PlanError, match=rf"^{name}='step': .*micro_batch"):
        Pass(dp_size=1, **{name: "step"})
