"""Rows that are generated together get what each would have got alone."""

from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_padding.on_cpu.rollout.batch_generation import Generation, generate
from verl_padding.on_cpu.tiny_models import make_tiny_model


def sharpened(model):
    """Random models answer all prompts alike: what comes before a token is made to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def model(request, tmp_path_factory):
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("models"))
    return sharpened(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def rows_of(model, *, count=17, **settings):
    """Requests of all lengths."""
    rng = Random(1)
    prompts = [
        [rng.randrange(model.config.vocab_size) for _ in range(rng.randint(1, 40))]
        for _ in range(count)
    ]
    return [
        Generation(prompt, rng.randint(1, 20), seed=seed, **settings)
        for seed, prompt in enumerate(prompts)
    ]


def test_in_float64_company_changes_no_bit_of_a_row(model):
    kind = {"qwen3_moe": {"experts_implementation": "eager"}}.get(model.config.model_type, {})
    exact = (
        type(model).from_pretrained(model.config._name_or_path, dtype=torch.float64, **kind).eval()
    )
    exact.load_state_dict(model.state_dict())
    assert exact.dtype == torch.float64
    found = []
    for together in (17, 3, 1):
        rows = rows_of(exact)
        for start in range(0, 17, together):
            generate(exact, rows[start : start + together])
        # as training rows hold them
        found.append(
            [
                (row.token_ids, torch.tensor(row.log_probs, dtype=torch.float32).tolist())
                for row in rows
            ]
        )
    assert found == [found[0]] * 3
