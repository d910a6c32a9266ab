"""Real updates of one rank beside stock verl with the same attention; sides take turns, the learning rate is 0.

All sides have the same weights, so their gradient norms must agree.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_gpu import rank, rows
from benchmarks.one_gpu.figures import Figures, seconds
from tests.support.engine_in_process import Row, trained_rows
from verl_padding.job.attention import PACKED
from verl_padding.pads.columns import LEAVES_OUT, OLD_LOG_PROBS_OF_UPDATE
from verl_padding.plan import BatchPlan, Sharing
from verl_padding.worker import log_probs
from verl_padding.worker.plan_packer import install


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    sharing: Sharing | None
    """None for stock verl."""
    has_pass: bool = False
    """Whether old log-probs are computed before the update."""
    skips: bool = False
    """Whether rows without an advantage are left out, and old log-probs are the update's own."""
    attention: str = PACKED


SIDES = (
    Side(name="stock verl", sharing=None, has_pass=True),
    Side(name="plan", sharing="off"),
    Side(name="trees", sharing="trees", has_pass=True),
    Side(name="trees, idle rows skipped, no pass", sharing="trees", skips=True),
)
ALL_PAIRS = Side(name="stock verl, sdpa", sharing=None, attention="sdpa")
"""What stock verl does without flash-attn: it masks all pairs of tokens, and computes log-probs token by token."""


def measure(figures: Figures, folder: Path, device: str, width: str, rounds: int, limit_s: float) -> None:
    """Keeps the seconds and the memory of each update; no new round begins after ``limit_s``."""
    cuda = device == "cuda"
    scale, vocabulary, budget = (0.02, 300, 512) if width == "small" else (1.0, 151_936, 16_384)
    compare_log_probs(figures, vocabulary, device)
    draw = random.Random(0)
    batches = {
        "8 rollouts of a prompt": rows.rollouts(draw, 5, 8, scale=scale, vocabulary=vocabulary),
        "8 turns, reasoning left out": rows.sessions(draw, 5, scale=scale, vocabulary=vocabulary, turns=8),
    }
    checkpointing = f"actor_rollout_ref.model.enable_gradient_checkpointing={str(cuda).lower()}"
    model = rank.make_model(folder, width, "qwen2", vocabulary, device)
    worker = rank.start_worker(model, "bf16" if cuda else "fp32", budget, device, checkpointing)
    parameters = sum(weight.numel() for weight in worker.actor.engine.module.parameters())
    figures.keep("model", width=width, parameters=parameters, token_budget=budget)
    for number, (name, texts) in enumerate(batches.items(), 1):
        batch = Batch(worker, texts, draw, budget, cuda)
        figures.keep("batch", batch=name, width=width, **batch.size)
        for side in SIDES:  # fills caches
            batch.update(side)
        for at in range(rounds):
            if seconds() > limit_s * number / len(batches):
                break
            for side in SIDES if at % 2 == 0 else reversed(SIDES):
                figures.keep("update", batch=name, width=width, side=side.name, **batch.update(side))
        if number == len(batches) and seconds() < limit_s:  # last: it may run out of memory
            figures.keep("update", batch=name, width=width, side=ALL_PAIRS.name, **batch.update(ALL_PAIRS))


class Batch:
    """A batch and its updates by a worker, each side of which has its plan."""

    def __init__(self, worker: Any, texts: rows.Texts, draw: random.Random, budget: int, cuda: bool):
        self._worker, self._budget, self._cuda = worker, budget, cuda
        self._rows: dict[str, Row] = {
            key: {name: value.float() if value.is_floating_point() else value for name, value in row.items()}
            for key, row in trained_rows(texts).items()
        }
        self._idle = rows.rows_of_prompts(self._rows, "012")
        for number, row in enumerate(self._rows.values()):
            advantage = 0.0 if number in self._idle else draw.gauss(0, 1)
            row["advantages"] = torch.full_like(row["advantages"], advantage)
        self._plans: dict[str, tuple[BatchPlan, float]] = {}
        self._has_log_probs = False
        self.size = {
            "rows": len(self._rows),
            "row_tokens": sum(len(row["input_ids"]) for row in self._rows.values()),
            "idle_rows": len(self._idle),
        }

    def update(self, side: Side) -> dict[str, Any]:
        """Seconds, peak memory and gradient norm of a side's pass and update."""
        self._worker.actor.engine.module.config._attn_implementation = side.attention
        plan, plan_s = self._plan(side)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        pass_s = self._pass(plan) if side.has_pass else 0.0
        said: dict[str, Any] = {"calculate_entropy": False}
        if plan is not None:
            said |= {LEAVES_OUT: side.skips, OLD_LOG_PROBS_OF_UPDATE: side.skips}
        data = rank.rows_of_call(self._rows, plan, **said)
        with log_probs_in_chunks(side is not ALL_PAIRS):
            output, update_s = self._timed(self._worker.update_actor, data)
        found = {"pass_s": round(pass_s, 4), "update_s": round(update_s, 4), "plan_s": round(plan_s, 4)}
        found["grad_norm"] = round(float(output["metrics"]["grad_norm"][0]), 5)
        if plan is not None:
            found["sharing_factor"] = round(plan.figures["actor"].sharing_factor, 3)
        if self._cuda:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return found

    def _plan(self, side: Side) -> tuple[BatchPlan | None, float]:
        if side.sharing is None:
            return None, 0.0
        install(side.sharing)(self._worker)
        if side.name not in self._plans:
            begun = time.perf_counter()
            idle = self._idle if side.skips else ()
            made = rows.plan(self._rows, self._budget, sharing=side.sharing, idle=idle, has_pass=side.has_pass)
            self._plans[side.name] = made, time.perf_counter() - begun
        return self._plans[side.name]

    def _pass(self, plan: BatchPlan | None) -> float:
        from verl.workers.utils.padding import response_from_nested

        data = rank.rows_of_call(self._rows, plan, "log_prob", calculate_entropy=True, compute_loss=False)
        output, taken = self._timed(self._worker.compute_log_prob, data)
        if plan is None and not self._has_log_probs:  # of weights that stay as they are: all sides get these
            log_probs = response_from_nested(output["log_probs"], data["response_mask"])
            for row, values in zip(self._rows.values(), log_probs.unbind(), strict=True):
                row["old_log_probs"] = values.float().clone()
            self._has_log_probs = True
        return taken

    def _timed(self, call: Callable[..., Any], data: Any) -> tuple[Any, float]:
        if self._cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        output = call(data)
        if self._cuda:
            torch.cuda.synchronize()
        return output, time.perf_counter() - begun


@contextmanager
def log_probs_in_chunks(switch: bool) -> Iterator[None]:
    """In chunks, or token by token, as verl computes them without flash-attn."""
    from verl.utils import torch_functional

    torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = switch
    try:
        yield
    finally:
        torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True


def compare_log_probs(figures: Figures, vocabulary: int, device: str) -> None:
    """Seconds and peak memory of log-probs and entropies of logits, forwards and backwards, beside verl's without
    flash-attn; what the logits themselves take is not counted."""
    from verl.utils import torch_functional

    n, dtype = (4096, torch.bfloat16) if device == "cuda" else (64, torch.float32)
    logits = torch.randn(n, vocabulary, device=device, dtype=dtype).requires_grad_()
    labels = torch.randint(vocabulary, (n,), device=device)
    sides = {
        "log-probs, token by token": lambda: torch_functional.logprobs_from_logits_v2(logits, labels),
        "log-probs in chunks": lambda: -log_probs.cross_entropy_loss(logits, labels)[0],
        "entropies at once": lambda: entropies_at_once(logits),
        "entropies in chunks": lambda: log_probs.entropy_from_logits(logits),
    }
    for number, (name, compute) in enumerate([*sides.items()] * 2):  # the first time of each warms up
        logits.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        compute().sum().backward()
        found = {}
        if device == "cuda":
            torch.cuda.synchronize()
            found["peak_gib"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2)
        taken = round(time.perf_counter() - begun, 4)
        if number >= len(sides):
            figures.keep("logits", by=name, tokens=n, seconds=taken, **found)


def entropies_at_once(logits: torch.Tensor) -> torch.Tensor:
    """verl's ``entropy_from_logits``, which ours replaces."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
