"""The ``padding`` section: what it takes, and what it refuses, each refusal with the key, the value
and the choices."""

from typing import get_args, get_type_hints

import pytest

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.plan import COST_MODELS, STRATEGIES


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"denominator": 3}, r"^padding.denominator=3: must be 'rows' or 'nominal'\.$"),
        ({"pad_length": 1}, r"^padding.pad_length=1: must be .* 2 or 'auto'\.$"),
        ({"sharing": ["tries"]}, r"^padding.sharing=\['tries'\]: "),
        ({"record": 1}, r"^padding.record=1: "),
        ({"seed": -1}, r"^padding.seed=-1: "),
        ({"seed": True}, r"^padding.seed=True: "),
        ({"stratgy": "rows"}, r"^padding.stratgy='rows': .*Did you mean strategy\?$"),
        (
            {"fields": {"mine": {"kind": "row", "size": 3}}},
            "^padding.fields.mine.size=3: unknown key",
        ),
        (
            {"fields": {"a": "b", "c": "d"}},
            r"^padding.fields.a.kind='b': must be [^:]*'multimodal'\.$",
        ),
        ("prompt", r"^padding='prompt': "),
    ],
)
def test_a_bad_section_is_refused_in_one_line(section, message):
    with pytest.raises(PaddingConfigError, match=message) as refusal:
        PaddingConfig.from_section(section)
    assert isinstance(refusal.value, PaddingError)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"fields": {"mine": {"role": "response"}}}, {"fields": {"mine": "response"}}),
        ({"cost_model": "model"}, {"cost_model": "attention"}),
    ],
)
def test_a_name_of_the_version_before_works_with_a_warning(old, new, caplog):
    assert PaddingConfig.from_section(old) == PaddingConfig.from_section(new)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert next(iter(old)) in record.message


def test_all_strategies_and_cost_models_are_choices():
    kinds = get_type_hints(PaddingConfig)
    assert get_args(kinds["strategy"]) == tuple(STRATEGIES)
    assert get_args(kinds["cost_model"]) == tuple(COST_MODELS)
