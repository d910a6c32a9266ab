"""Rows of text alone on models of the Qwen2-VL kind."""

import pytest
import torch
import transformers
from verl.models.transformers import qwen2_vl

from tests.support.vision_rows import make_vision_model
from verl_padding.verl_fixes import text_without_image

IDS = torch.arange(5, 12)[None]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def model(request, tmp_path_factory):
    folder = make_vision_model(request.param, tmp_path_factory.mktemp("model"))
    auto = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    # As verl's forward passes have it: embeddings and vision tower of one object.
    return auto.model


@pytest.fixture
def repaired(model):
    """The same, as a padded engine's; taken back after the test."""
    text_without_image.give_features_alone(torch.nn.ModuleDict({"wrapped": model}))
    yield model
    model.visual._forward_hooks.clear()


def test_text_gets_its_embeddings_and_the_tower_a_gradient_of_zero(repaired):
    embeds, _ = qwen2_vl._get_input_embeds(repaired, IDS)
    assert torch.equal(embeds, repaired.get_input_embeddings()(IDS))
    embeds.sum().backward()
    gradients = [parameter.grad for parameter in repaired.visual.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients), (
        "the tower did not run"
    )
    repaired.zero_grad()


def test_verls_own_function_still_stops_at_text_alone(model):
    # When this fails, verl runs on text alone: take the hook out.
    with pytest.raises(AttributeError, match="mean"):
        qwen2_vl._get_input_embeds(model, IDS)


def test_an_image_gives_what_it_gives_without_the_hook(model):
    vision = model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels, grid = torch.ones(16, width), torch.tensor([[1, 4, 4]])
    n_tokens = 16 // vision.spatial_merge_size**2
    ids = torch.full((1, n_tokens), model.config.image_token_id)
    want, _ = qwen2_vl._get_input_embeds(model, ids, None, pixels, image_grid_thw=grid)
    text_without_image.give_features_alone(model)
    got, _ = qwen2_vl._get_input_embeds(model, ids, None, pixels, image_grid_thw=grid)
    model.visual._forward_hooks.clear()
    assert torch.equal(got, want)
    assert not torch.equal(want, model.get_input_embeddings()(ids))
