"""An update of rows that share beginnings, on any device: exactness, seconds and memory of rows, chains and trees.

It needs torch, transformers, verl and this checkout, no Ray::

    python -m benchmarks.tree_attention            # a CUDA device, by torch's own attention
    python -m benchmarks.tree_attention --small    # a small case, also on a CPU
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import torch

with suppress(ImportError):  # where torchvision is another build than torch, transformers loads with it alone
    import verl_padding.on_cpu  # noqa: F401

import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import flash_attention
from verl.models.transformers.monkey_patch import _ulysses_flash_attention_forward

from verl_padding.prefix_sharing.attention import GatherTokens, attention_layers, patch_attention
from verl_padding.prefix_sharing.tree import TREE, PrefixTree, build_tree
from verl_padding.worker.packed_attention import use_packed_attention

KINDS = ("rows", "chains", "trees")
WIDTHS = {
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
VOCABULARY = 32_000


def rollouts(draw: random.Random, scale: float) -> list[list[int]]:
    """Eight rollouts of a prompt of 4,000 tokens, with responses of 1,000."""
    prompt = _tokens(draw, 4_000 * scale)
    return [prompt + _tokens(draw, draw.uniform(500, 1_500) * scale) for _ in range(8)]


def stripped_sessions(draw: random.Random, scale: float) -> list[list[int]]:
    """Two sessions of eight model calls, each a row, whose earlier reasoning the chat template leaves out."""
    prompt, rows = _tokens(draw, 800 * scale), []
    for _ in range(2):
        context = prompt
        for _ in range(8):
            answer = _tokens(draw, 100 * scale)
            rows.append(context + _tokens(draw, 300 * scale) + answer)
            context = context + answer + _tokens(draw, 250 * scale)
    return rows


def grown_session(draw: random.Random, scale: float) -> list[list[int]]:
    """A session of eight model calls, each a row that begins with the whole row before it."""
    context, rows = _tokens(draw, 800 * scale), []
    for _ in range(8):
        context = context + _tokens(draw, 650 * scale)
        rows.append(context)
    return rows


BATCHES: dict[str, Callable[[random.Random, float], list[list[int]]]] = {
    "8 rollouts of a prompt": rollouts,
    "16 calls, reasoning left out": stripped_sessions,
    "8 calls, each extends the last": grown_session,
}


def _tokens(draw: random.Random, number: float) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(max(1, round(number)))]


def tree_of(rows: Sequence[Sequence[int]], kind: str) -> PrefixTree:
    """The tree of some rows; that of ``rows`` shares nothing, that of ``chains`` whole rows."""
    order = sorted(range(len(rows)), key=lambda row: rows[row], reverse=True)
    shared_I = [0]
    for before, row in pairwise(order):
        alike = next(
            (n for n, (a, b) in enumerate(zip(rows[before], rows[row], strict=False)) if a != b), len(rows[row])
        )
        shared_I.append(alike if kind == "trees" or (kind == "chains" and alike == len(rows[row])) else 0)
    return build_tree([len(row) for row in rows], order, shared_I)


class Update:
    """The forward and backward pass of one micro-batch, all rows of it packed, or each by itself."""

    def __init__(self, model: nn.Module, rows: Sequence[Sequence[int]], kind: str):
        self._model, self._tree = model, tree_of(rows, kind)
        device = next(model.parameters()).device
        starts = zip(self._tree.tip_S, self._tree.start_S, strict=True)
        places = [(rows[tip][start:], range(start, len(rows[tip]))) for tip, start in starts]
        self._ids = torch.tensor([[token for tokens, _ in places for token in tokens]], device=device)
        self._positions = torch.tensor([[at for _, positions in places for at in positions]], device=device)
        self._row_places = self._tree.row_places.to(device)
        lengths = [len(row) for row in rows]
        weights = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)) / sum(lengths)
        weights[torch.tensor(lengths).cumsum(0) - 1] = 0  # a row's last output belongs to no token
        self._weights = weights.to(device)
        self.tokens = self._tree.tokens

    def __call__(self) -> None:
        for layer in attention_layers(self._model):
            setattr(layer, TREE, self._tree if self._tree.branches else None)
        output = self._model(input_ids=self._ids, position_ids=self._positions, use_cache=False)
        labels = self._ids.roll(-1, dims=1)[0]
        log_probs = -nn.functional.cross_entropy(output.logits[0].float(), labels, reduction="none")
        (GatherTokens.apply(log_probs, 0, self._row_places) * self._weights).sum().backward()

    def gradient(self) -> torch.Tensor:
        """All gradients, in float32, after one update."""
        self()
        flat = torch.cat([parameter.grad.detach().float().flatten() for parameter in self._model.parameters()])
        self._model.zero_grad(set_to_none=True)
        return flat


def make_model(width: str, layers: int, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        **WIDTHS[width], num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=1 << 15
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    use_packed_attention(model)
    return model


def measure(width: str, layers: int, device: str, repeats: int, scale: float) -> list[dict[str, Any]]:
    figures = []
    for name, make in BATCHES.items():
        rows = make(random.Random(0), scale)
        model = make_model(width, layers, device, torch.float32)
        exact = {kind: Update(model, rows, kind).gradient() for kind in KINDS}
        del model
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = make_model(width, layers, device, dtype)
        updates = {kind: Update(model, rows, kind) for kind in KINDS}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        gib: dict[str, float] = {}
        errors = {kind: _distance(update.gradient(), exact["rows"]) for kind, update in updates.items()}
        for _ in range(repeats):
            for kind, update in updates.items():
                if device != "cpu":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                update()
                if device != "cpu":
                    torch.cuda.synchronize()
                    gib[kind] = torch.cuda.max_memory_allocated() / 2**30
                seconds[kind].append(time.perf_counter() - started)
                model.zero_grad(set_to_none=True)
        for kind in KINDS:
            figures.append(
                {
                    "width": width,
                    "layers": layers,
                    "batch": name,
                    "kind": kind,
                    "sharing_factor": round(updates["rows"].tokens / updates[kind].tokens, 2),
                    "speed_up": round(median(seconds["rows"]) / median(seconds[kind]), 2),
                    "seconds": [round(each, 4) for each in seconds[kind]],
                    "peak_gib": round(gib[kind], 2) if gib else None,
                    "error_float32": _distance(exact[kind], exact["rows"]),
                    f"error_{str(dtype).removeprefix('torch.')}": errors[kind],
                }
            )
            print(json.dumps(figures[-1]), flush=True)
        del model, updates
    return figures


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", choices=list(WIDTHS), default=["0.5B", "8B"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="rows a fortieth as long, a small model")
    parser.add_argument("--keep", help="file to write the figures to")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    patch_attention()
    flash_attention._flash_attention_forward = _ulysses_flash_attention_forward  # as verl's apply_monkey_patch
    figures: list[dict[str, Any]] = []
    for width in ["small"] if options.small else options.widths:
        scale = 1 / 40 if options.small else 1.0
        figures += measure(width, options.layers, device, options.repeats, scale)
    if options.keep:
        of = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        with open(options.keep, "w") as file:
            json.dump({"device": of, "versions": versions, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
