"""flash-attn's functions by torch are those that flash-attn documents."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from tests.support.flash_attention_on_cpu import flash_attn_varlen_func as reference
from verl_padding.errors import PaddingError
from verl_padding.worker.varlen_attention import flash_attn_varlen_func, how_to_group_heads


def ends_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], dict[str, Any]]:
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


@pytest.mark.parametrize(
    ("takes", "how"), [("plain", {}), ("told", {"enable_gqa": True}), ("wrong", None), ("no", None)]
)
def test_how_the_kernel_takes_grouped_heads_is_tried(takes, how, monkeypatch):
    def kernel(q, k, v, ends_q, ends_k, max_q, max_k, *, window_size, enable_gqa=False):
        grouped = q.shape[1] != k.shape[1]
        if grouped and (takes == "no" or (takes == "told" and not enable_gqa)):
            raise RuntimeError("heads differ")
        out = reference(q, k, v, ends_q, ends_k, max_q, max_k, causal=True)
        return out + 1 if grouped and takes == "wrong" else out

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    how_to_group_heads.cache_clear()
    assert how_to_group_heads(torch.device("cpu")) == how
    how_to_group_heads.cache_clear()


@pytest.mark.parametrize("said", [{"softcap": 50.0}, {"s_aux": torch.ones(4)}])
def test_what_torch_has_no_kernel_for_is_refused(said):
    states, ends = torch.randn(3, 5, 4, 8), ends_of([5])
    with pytest.raises(PaddingError, match="Install flash-attn"):
        flash_attn_varlen_func(*states, ends, ends, 5, 5, **said)
