"""Rows that are generated together get what each would have got alone."""

from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_padding.on_cpu.rollout.batch_generation import Generation, generate
from verl_padding.on_cpu.tiny_models import make_tiny_model


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def model(request, tmp_path_factory):
    """In float64. Random models answer all prompts alike: what comes before a token is made to
    matter."""
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("models"))
    kind = {"experts_implementation": "eager"} if request.param == "qwen3_moe" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def requests(vocabulary):
    """Of all lengths."""
    rng = Random(1)
    prompts = [rng.choices(range(vocabulary), k=rng.randint(1, 40)) for _ in range(17)]
    return [Generation(prompt, rng.randint(1, 20), seed=n) for n, prompt in enumerate(prompts)]


def test_in_float64_company_changes_no_bit_of_a_row(model):
    found = []
    for together in (17, 3, 1):
        rows = requests(model.config.vocab_size)
        for start in range(0, 17, together):
            generate(model, rows[start : start + together])
        # As training rows hold them.
        float32 = [torch.tensor(row.log_probs).tolist() for row in rows]
        found.append([(row.token_ids, each) for row, each in zip(rows, float32, strict=True)])
    assert found == [found[0]] * 3
