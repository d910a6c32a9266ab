"""What is read of a model's config."""

import pytest

from verl_padding.job.model_config import rope_by_length

DYNAMIC_ROPE = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ({"llm_config": DYNAMIC_ROPE, "vision_config": {}}, "rope_type='dynamic'"),
        ({"thinker_config": {"text_config": DYNAMIC_ROPE}}, "rope_type='dynamic'"),
        (
            {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}},
            "rope_type='longrope'",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_type='su'",
        ),
    ],
)
def test_positions_by_length_are_found_in_any_text_part_and_in_no_tower(model, setting):
    assert rope_by_length(model) == setting
    assert rope_by_length({"vision_config": model}) is None
