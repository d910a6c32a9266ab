"""Log-probs in chunks, beside verl's own functions and worked-out values."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.utils import torch_functional
from verl.workers.config import DistillationLossConfig

from verl_padding.worker import log_probs
from verl_padding.worker.log_probs import cross_entropy_loss, use_chunked_cross_entropy
from verl_padding.worker.varlen_attention import HALF

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=[3 * 50, 50, 1, 2**26], ids="chunk {}".format)
def _chunk(request, monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK", request.param)


def drawn(dtype):
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(8, 50, generator=draw)).to(dtype).requires_grad_()
    return logits, torch.randint(0, 50, (8,), generator=draw)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_and_their_gradients_are_verls_to_rounding(dtype, in_place):
    logits, labels = drawn(dtype)
    weights = torch.linspace(-1, 1, 8)
    want = torch_functional.logprobs_from_logits_v2(logits, labels)
    (want_gradient,) = torch.autograd.grad((want * weights).sum(), logits)
    inner = logits * 1  # a leaf may not be overwritten
    found = -cross_entropy_loss(inner, labels, inplace_backward=in_place)[0]
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    tolerance = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    torch.testing.assert_close(found, want.to(found.dtype), **tolerance)
    torch.testing.assert_close(gradient, want_gradient, **tolerance)
    assert inner.equal(logits) == (not in_place or dtype not in HALF)


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_top_k_distillation_keeps_its_gradient_beside_log_probs(dtype, in_chunks):
    """verl's engine reads the same logits for both, the distillation first."""
    loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=4, use_chunked_topk=in_chunks)
    config = SimpleNamespace(distillation_loss=loss)
    leaf, labels = drawn(dtype)
    teacher = torch.randn(8, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_probs_of, ids_of = (
        torch.nested.as_nested_tensor([values], layout=torch.jagged) for values in teacher.topk(4)
    )

    def distilled(logits):
        found = compute_forward_kl_topk(logits[None], log_probs_of, ids_of, config, "thd")
        return found["distillation_losses"].sum()

    logits = leaf * 1
    both = distilled(logits), -cross_entropy_loss(logits, labels, inplace_backward=True)[0].sum()
    (together,) = torch.autograd.grad(sum(both), leaf)
    alone = [
        torch.autograd.grad(loss_of(leaf), leaf)[0]
        for loss_of in (distilled, lambda logits: -cross_entropy_loss(logits, labels)[0].sum())
    ]
    tolerance = {"rtol": 2 * DTYPES[dtype], "atol": 2 * DTYPES[dtype]}
    torch.testing.assert_close(together, sum(alone), **tolerance)


def stock_functions():
    """verl's module once more, as it is before ours are put into it: under another name, no hook
    finds it."""
    spec = importlib.util.spec_from_file_location("stock_functions", torch_functional.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kernel", [None, "FLAH_ATTN", "NPU"])
def test_verl_takes_them_where_it_has_no_kernel(kernel):
    module = stock_functions()
    if kernel is not None:
        setattr(module, f"{kernel}_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    use_chunked_cross_entropy(module)
    assert hasattr(module, "cross_entropy_loss") == (kernel is None)


@pytest.mark.parametrize("words", [152_000])
def test_sums_over_many_words_of_low_precision_are_exact_to_float32(words):
    """In bfloat16, sums over 152,000 words are off by 0.04."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, words, generator=draw).bfloat16()
    labels = torch.tensor([3, 5])
    found = cross_entropy_loss(logits, labels)[0]
    assert found.dtype == torch.float32
    exact = -logits.double().log_softmax(-1)[[0, 1], labels]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
