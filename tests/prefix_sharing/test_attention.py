"""The gradients of tokens that many branches attend to."""

import pytest
import torch

from verl_padding.prefix_sharing.attention import GatherTokens


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("branches", [8, 32, 128])
def test_gradients_of_many_branches_add_up_in_float32(branches, dim):
    exact = (
        torch.randn(branches, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        + 1
    )
    # Attention calls it along the tokens of (1, tokens, heads, head size), where torch's own
    # index_add_ adds in bfloat16.
    shape = [1] * dim + [1, 64]
    states = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    gathered = GatherTokens.apply(states, dim, torch.zeros(branches, dtype=torch.int64))
    gathered.backward(exact.to(torch.bfloat16).view_as(gathered))
    want = exact.to(torch.bfloat16).double().sum(0)
    assert ((states.grad.view(64).double() - want) / want).abs().max() <= torch.finfo(
        torch.bfloat16
    ).eps / 2 * 1.01
