"""What worker calls require of rows, and what they are refused for."""

import pytest

from verl_padding.plan import Pass, PlanError


@pytest.mark.parametrize("name", ["sync_point", "padded_to"])
def test_a_choice_that_there_is_not_is_refused_with_those_there_are(name):
    with pytest.raises(PlanError, match=rf"^{name}='step': .*micro_batch"):
        Pass(dp_size=1, **{name: "step"})
