"""Real updates of one rank beside stock verl with the same attention; sides take turns, the
learning rate is 0.

Packed rows of a Qwen3.5 are apart on all sides, as stock verl leaves them together.

All sides have the same weights, so their gradient norms must agree.
"""

import gc
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_gpu import rank, rows
from benchmarks.one_gpu.figures import Figures, seconds, timed
from verl_padding.plan import BatchPlan

KINDS = ("qwen2", "qwen3_5_text")
SHORTER = {} if find_spec("fla") else {"qwen3_5_text": 1 / 16}
"""Lengths of texts on a GPU: without fla, torch computes linear attention there, 64 tokens of a row
one after the other."""
STOCK, SHARING = "stock verl", "sharing"
SKIPPING = f"{SHARING}, zero-advantage rows skipped, no pass"
SIDES = (STOCK, SHARING, SKIPPING)


def measure(figures: Figures, folder: Path, device: str, rounds: int, limit_s: float) -> None:
    """Keeps the seconds and the memory of each update; no new round begins after ``limit_s``."""
    cuda = device == "cuda"
    size, vocabulary, budget = ("0.5B", 151_936, 16_384) if cuda else ("small", 300, 512)
    draw = random.Random(0)
    checkpointing = f"actor_rollout_ref.model.enable_gradient_checkpointing={str(cuda).lower()}"
    for number, kind in enumerate(KINDS):
        model = rank.make_model(folder, size, kind, vocabulary, device)
        worker = rank.start_worker(model, "bf16" if cuda else "fp32", budget, device, checkpointing)
        shape = {"scale": SHORTER.get(kind, 1.0) if cuda else 0.02, "vocabulary": vocabulary}
        batches = {
            "8 rollouts of a prompt": rows.rollouts(draw, 5, 8, **shape),
            "8 turns, reasoning left out": rows.sessions(draw, 5, turns=8, **shape),
        }
        for at, (name, texts) in enumerate(batches.items(), 1):
            batch = Batch(worker, texts, draw, budget, cuda)
            of = {"model": kind, "batch": name}
            figures.keep("batch", **of, row_tokens=batch.tokens)
            for side in SIDES:  # fills caches
                batch.update(side)
            share_of_time = (number + at / len(batches)) / len(KINDS)
            for turn in range(rounds):
                if seconds() > limit_s * share_of_time:
                    break
                for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                    figures.keep("update", **of, side=side, **batch.update(side))
        del worker, batch  # before the next ones are there
        gc.collect()


class Batch:
    """A batch and its updates by a worker, each side of which has its plan."""

    def __init__(
        self, worker: Any, texts: rows.Texts, draw: random.Random, budget: int, cuda: bool
    ):
        self._worker, self._cuda = worker, cuda
        self._rows = {
            key: dict(row) for key, row in rows.trained_rows(texts, torch.float32).items()
        }
        zero_advantage = rows.rows_of_prompts(self._rows, "012")
        for number, row in enumerate(self._rows.values()):
            advantage = 0.0 if number in zero_advantage else draw.gauss(0, 1)
            row["advantages"] = torch.full_like(row["advantages"], advantage)
        self._plans: dict[str, BatchPlan | None] = {
            STOCK: None,
            SHARING: rows.plan(self._rows, budget, sharing="on", has_pass=True),
            SKIPPING: rows.plan(self._rows, budget, sharing="on", zero_advantage=zero_advantage),
        }
        from verl.workers.utils.padding import response_from_nested

        # Of weights that stay as they are: all sides get the same.
        data, output, _ = self._pass(None)
        log_probs = response_from_nested(output["log_probs"], data["response_mask"])
        for row, values in zip(self._rows.values(), log_probs.unbind(), strict=True):
            row["old_log_probs"] = values.float().clone()
        self.tokens = sum(len(row["input_ids"]) for row in self._rows.values())

    def update(self, side: str) -> dict[str, Any]:
        """Seconds, peak memory and gradient norm of a side's pass and update."""
        plan, skips = self._plans[side], side == SKIPPING
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        pass_s = 0.0 if skips else self._pass(plan)[2]
        said: dict[str, Any] = {
            "calculate_entropy": False,
            "drops_rows": skips,
            "takes_own_log_probs": skips,
        }
        data = rank.rows_of_call(self._rows, plan, **said)
        output, update_s = timed(lambda: self._worker.update_actor(data), self._cuda)
        found = {"pass_s": pass_s, "update_s": update_s}
        found["grad_norm"] = float(output["metrics"]["grad_norm"][0])
        if plan is not None:
            found["sharing_factor"] = plan.figures["actor"].sharing_factor
        if self._cuda:
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return found

    def _pass(self, plan: BatchPlan | None) -> tuple[Any, Any, float]:
        """The rows, the outputs and the seconds of a log-prob pass."""
        said = {"calculate_entropy": True, "compute_loss": False}
        data = rank.rows_of_call(self._rows, plan, "log_prob", **said)
        return data, *timed(lambda: self._worker.compute_log_prob(data), self._cuda)
