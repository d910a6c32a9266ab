"""What is read of a model's config."""

import json

import pytest
from omegaconf import OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.job.model_config import read_model_config, rope_by_length

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


def test_no_network_is_asked_for_a_model_that_a_models_config_names(tmp_path, monkeypatch):
    config = {"model_type": "dpt", "backbone": "someone/model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *_, **__: asked.append(host))
    with pytest.raises(PaddingConfigError, match=r"^model\.path="):
        read_model_config(OmegaConf.create({"model": {"path": str(tmp_path)}}), "model")
    assert not asked
