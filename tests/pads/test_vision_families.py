"""The smallest image of a model, by its type."""

import pytest
import torch

from tests.support.deep_equality import assert_equal
from verl_padding.errors import PaddingConfigError
from verl_padding.pads.vision_families import RUNS_WITHOUT_IMAGES, image_maker

QWEN = {"vision_start_token_id": 90, "image_token_id": 91, "vision_end_token_id": 92}
QWEN |= {"vision_config": {"spatial_merge_size": 2}}
GEMMA = {
    "mm_tokens_per_image": 4,
    "image_token_index": 91,
    "boi_token_index": 90,
    "eoi_token_index": 92,
}


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos"])
def test_qwens_smallest_image_is_one_token_of_merged_patches(model_type, name):
    image = image_maker("auto", QWEN | {"model_type": model_type})(
        {name: torch.rand(16, 24, dtype=torch.bfloat16)}
    )
    assert_equal(image.inputs["pixel_values"], torch.zeros(4, 24, dtype=torch.bfloat16))
    assert image.inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert image.token_ids == (90, 91, 92)


def test_gemmas_smallest_image_is_a_whole_one():
    image = image_maker("auto", GEMMA | {"model_type": "gemma3"})(
        {"pixel_values": torch.rand(3, 3, 28, 28)}
    )
    assert image.inputs["pixel_values"].shape == (1, 3, 28, 28)
    assert image.token_ids == (90, 91, 91, 91, 91, 92)


def test_what_pads_show_can_be_chosen_and_an_unknown_model_is_refused():
    assert not any(
        image_maker("auto", {"model_type": model_type}) for model_type in RUNS_WITHOUT_IMAGES
    )
    assert image_maker("empty", {"model_type": "new_vl"}) is None
    for choice in ("auto", "minimal"):
        with pytest.raises(
            PaddingConfigError, match=rf"^padding\.multimodal='{choice}': .* type 'new_vl' .*=empty"
        ):
            image_maker(choice, {"model_type": "new_vl"})
