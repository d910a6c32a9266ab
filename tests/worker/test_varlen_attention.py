"""flash-attn's functions by torch are those that flash-attn documents."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from tests.support.flash_attention_on_cpu import flash_attn_varlen_func as reference
from verl_padding.errors import PaddingError
from verl_padding.worker import varlen_attention
from verl_padding.worker.varlen_attention import flash_attn_varlen_func, kernel_settings


def ends_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@st.composite
def calls(draw):
    """Queries that are at most as many as their keys, and how they are attended to."""
    keys = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    queries = [draw(st.integers(1, n)) for n in keys]
    of_keys, groups, size = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([4, 8])),
    )
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shapes = [(sum(queries), of_keys * groups, size), *[(sum(keys), of_keys, size)] * 2]
    states = [
        torch.randn(shape, generator=numbers, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    window = draw(st.integers(0, 6))
    said = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (window, window), (window, 0)])),
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
    }
    return [
        *states,
        ends_of(queries),
        ends_of(keys),
        torch.tensor(max(queries)),
        torch.tensor(max(keys)),
    ], said


@given(calls())
@settings(deadline=None)
def test_outputs_and_gradients_are_those_that_flash_attn_documents(call):
    arguments, said = call
    found, wanted = (attend(*arguments, **said) for attend in (flash_attn_varlen_func, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    gradients = [
        torch.autograd.grad((out * weights).sum(), arguments[:3]) for out in (found, wanted)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_what_torchs_kernel_can_be_told_is_read_of_it():
    assert {"scale", "window_size"} < {*kernel_settings()}


@given(calls(), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_torchs_kernel_is_told_all_that_it_is_called_with(call, dropout, is_told):
    """A kernel that is only here in name: what it computes on a GPU, it has to be told."""
    arguments, said = call
    told = []

    def kernel(q, k, v, ends_q, ends_k, max_q, max_k, **how):
        told.append((q, k, v, ends_q, ends_k, max_q, max_k, how))
        return reference(*arguments, **said)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(varlen, "varlen_attn", kernel)
        patched.setattr(varlen_attention, "has_kernel", lambda query: True)
        names = ("enable_gqa",) if is_told else ()
        patched.setattr(varlen_attention, "kernel_settings", lambda: names)
        flash_attn_varlen_func(*arguments, **said, dropout_p=dropout)
    if dropout:  # torch's kernel has none, so rows are attended to one by one
        assert not told
        return
    ((*given_arguments, how),) = told
    assert all(map(torch.equal, given_arguments[:5], arguments[:5]))
    assert given_arguments[5:] == [int(most) for most in arguments[5:]]
    left, right = said["window_size"]
    grouped = arguments[0].shape[1] != arguments[1].shape[1]
    want = {"scale": said["softmax_scale"], "window_size": (left, 0 if said["causal"] else right)}
    assert how == want | ({"enable_gqa": True} if grouped and is_told else {})


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_attention_row_by_row_drops_what_it_is_told(dropout):
    states, ends = torch.ones(3, 5, 2, 8), ends_of([2, 3])
    out = flash_attn_varlen_func(*states, ends, ends, 3, 3, dropout_p=dropout, causal=True)
    assert bool(out.any()) == (not dropout)


@pytest.mark.parametrize("said", [{"softcap": 50.0}, {"s_aux": torch.ones(4)}])
def test_what_torch_has_no_kernel_for_is_refused(said):
    states, ends = torch.randn(3, 5, 4, 8), ends_of([5])
    with pytest.raises(PaddingError, match="Install flash-attn"):
        flash_attn_varlen_func(*states, ends, ends, 5, 5, **said)
