"""The ``padding`` section: what it takes, and what it refuses, each refusal with the key, the value
and the choices."""

import pytest

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.plan import STRATEGIES


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"strategy": "chunks"},
            rf"^padding.strategy='chunks': .*Choices: {', '.join(STRATEGIES)}\.$",
        ),
        ({"denominator": 3}, r"^padding.denominator=3: "),
        ({"pad_length": 1}, r"^padding.pad_length=1: "),
        ({"sharing": ["tries"]}, r"^padding.sharing=\['tries'\]: "),
        ({"seed": -1}, r"^padding.seed=-1: "),
        ({"seed": True}, r"^padding.seed=True: "),
        ({"stratgy": "rows"}, r"^padding.stratgy='rows': .*Did you mean strategy\?$"),
        ({"fields": {"mine": {"role": "row"}}}, r"^padding.fields.mine.role='row': unknown key"),
        ("prompt", r"^padding='prompt': "),
    ],
)
def test_a_bad_section_is_refused_in_one_line(section, message):
    with pytest.raises(PaddingConfigError, match=message) as refusal:
        PaddingConfig.from_section(section)
    assert isinstance(refusal.value, PaddingError)
    assert isinstance(refusal.value, ValueError)
