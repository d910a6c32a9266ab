"""Rows that begin alike and part, computed once up to there, give in float64 what each row gives
alone."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from verl.models.transformers.dense_common import forward_with_torch_backend

from tests.support.branching_rows import branching_rows
from tests.support.engine_in_process import (
    Actor,
    Critic,
    in_float64,
    off_rows_alone,
    one_micro_batch,
    start_engine,
    trained_rows,
)
from tests.support.losses_on_rows import critic_loss, policy_loss
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.errors import PaddingError
from verl_padding.on_cpu.tiny_models import SIZES
from verl_padding.worker.losses import normalize_over_mini_batch

SMALL = SIZES | {"vocab_size": 259, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def rows():
    return list(trained_rows(branching_rows()).values())


def sliding_window(_models):
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return in_float64(Qwen2ForCausalLM(config))


def adapted(model):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, config).double()


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def fused(model):
    model.forward = partial(forward_with_torch_backend, model)  # as verl does, of this model alone
    return model


CHUNKS = {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 7}
CASES = {
    "another architecture": (lambda models: models("qwen3"), {}, {}),
    "experts": (lambda models: models("qwen3_moe", experts_implementation="eager"), {}, {}),
    "adapters": (lambda models: adapted(models("qwen2")), {}, {}),
    "gradient checkpointing": (lambda models: checkpointed(models("qwen2")), {}, {}),
    "entropy in chunks": (lambda models: models("qwen2"), CHUNKS, {}),
    "entropy checkpointing": (lambda models: models("qwen2"), {"entropy_checkpointing": True}, {}),
    "fused kernels": (lambda models: fused(models("qwen2")), {}, {"use_fused_kernels": True}),
    "sum of pi squared": (lambda models: models("qwen2"), {}, {"calculate_sum_pi_squared": True}),
    "a temperature": (lambda models: models("qwen2"), {}, {"temperature": 0.7}),
    "a sliding window": (sliding_window, {}, {}),
    "a critic": (
        lambda models: models("qwen2", AutoModelForTokenClassification, num_labels=1),
        {},
        {"calculate_entropy": False},
    ),
}
"""The model, settings of the engine, and what each micro-batch says, of what an engine computes in
another way."""
THROUGH_FLOAT32 = ("experts", "fused kernels")  # routers and kernels of transformers and verl


@pytest.mark.parametrize("name", CASES)
def test_rows_that_branch_give_the_outputs_and_gradients_of_each_row_alone(name, models, rows):
    make_model, settings, said = CASES[name]
    kind, loss = (Critic, critic_loss) if name == "a critic" else (Actor, policy_loss)
    sharing = start_engine(kind, make_model(models), shares=True, **settings)
    plain = kind(make_model(models), **settings)
    loss = normalize_over_mini_batch(loss("seq-mean-token-mean"))
    of_outputs, of_gradient = off_rows_alone(sharing, plain, rows, loss, **said)
    tolerance = RELATIVE_FLOAT32 if name in THROUGH_FLOAT32 else RELATIVE_FLOAT64
    assert of_outputs <= 10 * tolerance
    assert of_gradient <= tolerance


def test_a_layer_that_attends_in_another_way_ends_the_job(models, rows):
    model = models("qwen2")
    model.config._attn_implementation = "eager"
    with pytest.raises(PaddingError, match=r"padding\.sharing"):
        start_engine(Actor, model, shares=True).forward_step(
            one_micro_batch(rows, rows, shared=True), None, True
        )


def test_a_sliding_window_that_only_the_mask_has_ends_the_job(rows):
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    config = Qwen2MoeConfig(**SMALL, **experts, **window)
    model = Qwen2MoeForCausalLM(config)
    with pytest.raises(PaddingError, match=r"sliding window only in a mask.*eager"):
        start_engine(Actor, model, shares=True).forward_step(
            one_micro_batch(rows, rows, shared=True), None, True
        )
