"""One layer's attention, packed rows beside their tree; log-probs in chunks beside all at once."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.one_gpu import rows
from benchmarks.one_gpu.figures import Figures, timed
from verl_padding.plan.forest import Forest
from verl_padding.prefix_sharing.attention import GatherTokens
from verl_padding.prefix_sharing.tree import PrefixTree, build_tree
from verl_padding.worker.log_probs import cross_entropy_loss, entropy_from_logits
from verl_padding.worker.varlen_attention import flash_attn_varlen_func

HEADS = {"0.5B": (14, 2, 64), "8B": (32, 8, 128)}
"""Heads, heads of keys, and the size of a head."""


def measure(figures: Figures, device: str, rounds: int) -> None:
    """Keeps the seconds of forward and backward passes, sides in turn, but for the first round."""
    on_gpu = device == "cuda"
    scale, vocabulary, tokens = (1.0, 151_936, 8192) if on_gpu else (0.02, 512, 64)
    draw = random.Random(0)
    batches = {
        "8 rollouts of a prompt": rows.rollouts(draw, 1, 8, scale=scale, vocabulary=vocabulary),
        "8 turns, reasoning left out": rows.sessions(
            draw, 1, scale=scale, vocabulary=vocabulary, turns=8
        ),
    }
    for width, heads in HEADS.items():
        for name, texts in batches.items():
            sides = {side: Attention(tree, heads, device) for side, tree in trees_of(texts).items()}
            for at in range(rounds + 1):
                for side, attend in sides.items():
                    taken, _ = measured(attend, device)
                    if at:
                        case = {"width": width, "batch": name, "tokens": attend.tokens}
                        figures.keep("attention", **case, side=side, seconds=taken)
    logits = torch.randn(tokens, vocabulary, device=device, dtype=torch.bfloat16)
    logits.requires_grad_()
    labels = torch.arange(tokens, device=device) % vocabulary
    for at in range(rounds + 1):
        for side, compute in {"in chunks": in_chunks, "all at once": all_at_once}.items():
            logits.grad = None
            taken, gib = measured(lambda compute=compute: compute(logits, labels), device)
            if at:
                figures.keep("log-probs", tokens=tokens, side=side, seconds=taken, peak_gib=gib)


def trees_of(texts: rows.Texts) -> dict[str, PrefixTree]:
    """The rows packed one behind the other, and their tree."""
    forest = Forest.from_tokens(
        [np.array(prompt + response) for prompt, response in texts.values()]
    )
    order = np.argsort(forest.dfs_position_R)
    lengths, shared = forest.tokens_R.tolist(), forest.shared_R[order]
    return {
        "rows": build_tree(lengths, order.tolist(), (0 * shared).tolist()),
        "trees": build_tree(lengths, order.tolist(), shared.tolist()),
    }


class Attention:
    """A layer's attention to a tree: keys and values gathered, one call of the kernel, backward."""

    def __init__(self, tree: PrefixTree, heads: tuple[int, int, int], device: str):
        heads_of_queries, heads_of_keys, size = heads
        self.tokens, self._tree = tree.tokens, tree
        self._paths = tree.paths(tree.tokens, torch.device(device))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._states = [
            torch.randn(tree.tokens, n, size, dtype=dtype, device=device, requires_grad=True)
            for n in (heads_of_queries, heads_of_keys, heads_of_keys)
        ]

    def __call__(self) -> None:
        q, k, v = self._states
        paths = self._paths
        if self._tree.branches:
            k, v = (GatherTokens.apply(states, 0, paths.places) for states in (k, v))
        lengths = max(paths.lengths_S), max(paths.path_lengths_S)
        out = flash_attn_varlen_func(
            q, k, v, paths.ends_S, paths.path_ends_S, *lengths, causal=True
        )
        out.sum().backward()


def in_chunks(logits: torch.Tensor, labels: torch.Tensor) -> None:
    (entropy_from_logits(logits).sum() + cross_entropy_loss(logits, labels)[0].sum()).backward()


def all_at_once(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """The log-softmax of all tokens, and verl's entropy."""
    from verl.utils import torch_functional

    log_probs = torch.log_softmax(logits.float(), dim=-1).gather(-1, labels[:, None])
    (torch_functional.entropy_from_logits(logits).sum() - log_probs.sum()).backward()


def measured(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds, and the peak of memory in GiB beside what was held before; 0 on a CPU."""
    if device != "cuda":
        return timed(call, on_gpu=False)[1], 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, taken = timed(call, on_gpu=True)
    return taken, (torch.cuda.max_memory_allocated() - before) / 2**30
