"""Rows of text alone on models of the Qwen2-VL kind."""

import sys
from types import ModuleType, SimpleNamespace

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


def test_text_gets_its_embeddings_and_the_tower_a_gradient_of_zero(model):
    embeds, _ = text_without_image.with_plain_features(qwen2_vl._get_input_embeds)(model, IDS)
    assert torch.equal(embeds, model.get_input_embeddings()(IDS))
    embeds.sum().backward()
    gradients = [parameter.grad for parameter in model.visual.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients), (
        "the tower did not run"
    )
    model.zero_grad()


def test_verls_own_function_still_stops_at_text_alone(model):
    # When this fails, verl runs on text alone: take the replacement out.
    with pytest.raises(AttributeError, match="mean"):
        qwen2_vl._get_input_embeds(model, IDS)


def test_an_image_goes_to_verls_function_and_no_hook_stays(model, monkeypatch):
    def verls(
        model, input_ids, attention_mask=None, pixel_values=None, pixel_values_videos=None, **grids
    ):
        return "verl's", pixel_values, grids

    module = ModuleType(text_without_image.MODULE)
    module._get_input_embeds = verls
    monkeypatch.setitem(sys.modules, text_without_image.MODULE, module)
    text_without_image.install_in_worker(SimpleNamespace())
    given = module._get_input_embeds(model, IDS, None, "pixels", None, image_grid_thw="grid")
    assert given == ("verl's", "pixels", {"image_grid_thw": "grid"})
    assert not model.visual._forward_hooks
