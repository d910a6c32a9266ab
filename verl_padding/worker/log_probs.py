"""Log-probs of logits in chunks, where flash-attn, whose cross entropy verl takes, is missing.

verl then computes those of one token after the other, in a loop of Python. Here the exponentials of
a chunk are all that is held beside the logits, forwards and backwards.
"""

from typing import Any

import torch

from verl_padding.worker.varlen_attention import HALF

CHUNK = 2**26
"""Exponentials that are held at once: 256 MiB in float32, 441 tokens of a vocabulary of 152,000."""


def use_chunked_cross_entropy(torch_functional: Any) -> None:
    """Puts ours into ``verl.utils.torch_functional``."""
    has_kernel = torch_functional.NPU_CROSS_ENTROPY_LOSS_AVAILABLE
    if not (has_kernel or torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE):
        torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True  # verl's spelling
        torch_functional.cross_entropy_loss = cross_entropy_loss


def cross_entropy_loss(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = False
) -> tuple[torch.Tensor, None]:
    """flash-attn's function of this name: (tokens, vocabulary) logits and labels (tokens,) ->
    losses (tokens,), None.

    Args:
        inplace_backward: whether the gradient may overwrite logits of half precision. Others may be
            kept for the gradient of another loss, as top-k distillation in chunks keeps them.
    """
    return CrossEntropy.apply(logits, labels, inplace_backward), None


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK // logits.shape[-1])
    return [slice(begin, begin + size) for begin in range(0, len(logits), size)]


def _exact(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        log_sums = torch.cat([_exact(logits[chunk]).logsumexp(-1) for chunk in _chunks(logits)])
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.in_place = in_place and logits.dtype in HALF
        return log_sums - _exact(logits.gather(-1, labels[:, None])[:, 0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The loss is log sum exp x - x[label], and its derivative by x is p, less 1 at the label.
        (gradient,), (logits, labels, log_sums) = gradients, ctx.saved_tensors
        out = logits.detach() if ctx.in_place else torch.empty_like(logits)
        for chunk in _chunks(logits):
            p = (_exact(logits[chunk]) - log_sums[chunk, None]).exp_()
            p.scatter_add_(1, labels[chunk, None], p.new_full((1, 1), -1.0).expand(len(p), 1))
            out[chunk] = p.mul_(gradient[chunk, None])
        return out, None, None
