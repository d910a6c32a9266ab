"""A critic is loaded where flash-attn is neither installed nor can be fetched."""

import pytest
import torch
from transformers import AutoModelForTokenClassification
from verl.utils import model as verl_model

from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.verl_fixes import critic_attention


def test_a_critic_is_loaded_with_the_attention_of_its_config(tmp_path, monkeypatch):
    """Once verl's ``load_valuehead_model`` asks for it, ``load_critics_by_config`` can go."""
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401  (whose import calls it)

    folder = make_tiny_model("qwen2", tmp_path)
    config = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).config
    config._attn_implementation = "sdpa"
    with pytest.raises((ImportError, RuntimeError)):
        verl_model.load_valuehead_model.__wrapped__(str(folder), torch.float32, config, False)
    critic = verl_model.load_valuehead_model(str(folder), torch.float32, config, False)
    assert critic.config._attn_implementation == "sdpa"
    assert critic(torch.randint(64, (1, 9))).logits.shape == (1, 9, 1)
    # With what transformers has flash attention from, verl's own goes on.
    monkeypatch.setattr(critic_attention, "is_kernels_available", lambda: True)
    with pytest.raises((ImportError, RuntimeError)):
        verl_model.load_valuehead_model(str(folder), torch.float32, config, False)
