"""Gradients and log-probs of a trained model on real text: with pads, with shared prefixes and
without zero-advantage rows, beside those of each row alone.

    python -m tests.equivalence.real_text [--keep]

Rows are sessions of recipes/guess with SmolLM2-135M-Instruct, whose guesses are drawn; old
log-probs are the model's own, moved by 0.1. Random weights attend almost evenly, a trained model to
few tokens: what leaks from one row into another shows here. Every difference is relative to the
norm of what each row gives alone in float64.
"""

import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import benchmarks.ray_and_queue  # noqa: F401  (before verl: it chooses verl's platform)

# isort: split
import pandas as pd
import torch
import typer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.utils.padding import response_from_nested

from benchmarks.one_gpu.rows import Row, rows_of_prompts
from benchmarks.results import Keep, report
from tests.support.engine_in_process import (
    Actor,
    Whole,
    cut_as_planned,
    in_float64,
    one_micro_batch,
    start_engine,
    trained_rows,
)
from tests.support.losses_on_rows import policy_loss
from tests.support.played import play
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Sharing, Update, plan_batch
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import uid_of_key
from verl_padding.recipes.guess.guess_loop import GUESSES, GuessLoop
from verl_padding.recipes.guess.make_data import write_data
from verl_padding.recipes.guess.smollm2 import make_smollm2
from verl_padding.worker.losses import RealRowsLoss, normalize_over_mini_batch

PROMPTS, SESSIONS, RANKS, BUDGET = 3, 3, 4, 512
AUTOCAST = "float32 weights, bfloat16 autocast"
DTYPES = {"float64": torch.float64, "float32": torch.float32, AUTOCAST: torch.float32}
UPDATE, PASS = "actor", "log_prob"
Found = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Log-probs of the response of each row, and the gradient."""


def play_sessions(model: Path) -> dict[str, Row]:
    """The rows of drawn guesses; those of prompt 0 have no advantage."""
    draw, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), top=15)
        data = pd.read_parquet(Path(folder, "train.parquet"))[:PROMPTS].to_dict("records")
    texts = {}
    for prompt, row in enumerate(data):
        row["raw_prompt"] = [*row["prompt"]]
        for session in range(SESSIONS):
            said = [f" {draw.randint(1, 15)}{draw.choice('.!?')}" for _ in range(GUESSES)]
            outputs, _ = play(
                GuessLoop, said, row, {"prompt_length": 200, "response_length": 3}, tokenizer
            )
            texts |= {
                f"p{prompt}_{session}_{index}": (output.prompt_ids, output.response_ids)
                for index, output in enumerate(outputs)
            }
    rows = {key: dict(row) for key, row in trained_rows(texts).items()}
    for number in rows_of_prompts(rows, "0"):
        row = list(rows.values())[number]
        row["advantages"] = torch.zeros_like(row["advantages"])
    return rows


def load(model: Path, dtype: str) -> nn.Module:
    module = AutoModelForCausalLM.from_pretrained(
        model, dtype=DTYPES[dtype], attn_implementation="sdpa"
    )
    return in_float64(module) if dtype == "float64" else module


def engine_of(module: nn.Module, dtype: str, *, shares: bool) -> Whole:
    engine = start_engine(Actor, module, shares=shares)
    if dtype == AUTOCAST:
        engine._autocast_dtype = torch.bfloat16
    return engine


def with_old_log_probs(engine: Whole, rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows with the model's own log-probs, moved by what `trained_rows` has drawn."""
    alone = {key: one_micro_batch([row], [row]) for key, row in rows.items()}
    made = {}
    for key, row in rows.items():
        with torch.no_grad():
            _, output = engine.forward_step(alone[key], None, forward_only=True)
        (own,) = _responses(output, alone[key]).unbind()
        moved = {name: row[name] + 5.6 + own.double() for name in ("old_log_probs", "ref_log_prob")}
        made[key] = row | moved
    return made


def _responses(output: Any, micro_batch: Any) -> torch.Tensor:
    return response_from_nested(output["model_output"]["log_probs"], micro_batch["response_mask"])


def alone(engine: Whole, rows: Mapping[str, Row]) -> Found:
    """Each row by itself."""
    every = list(rows.values())
    loss = normalize_over_mini_batch(policy_loss("token-mean"))
    return _computed(
        engine, loss, (([key], one_micro_batch([row], every)) for key, row in rows.items())
    )


def planned(
    rows: Mapping[str, Row], sharing: Sharing = "off", zero_advantage: list[int] | None = None
) -> BatchPlan:
    """One mini-batch of all rows, and a pass that takes its micro-batches."""
    call = {"dp_size": RANKS, "token_budget": BUDGET}
    update = Update(
        **call, prompts_per_mini_batch=PROMPTS, drops_zero_advantage=zero_advantage is not None
    )
    job = Job(
        strategy="prompt",
        prompts=PROMPTS,
        sessions_per_prompt=SESSIONS,
        updates={UPDATE: update},
        inference={PASS: Pass(**call, as_update=UPDATE)} if zero_advantage is None else {},
        packer="plan",
        sharing=sharing,
    )
    ids_R = [row["input_ids"].numpy() for row in rows.values()]
    tries = PrefixTries.from_tokens(ids_R, list(map(uid_of_key, rows)))
    return plan_batch(
        Rows.from_keys(rows, tries.tokens_R.tolist(), tries, zero_advantage or ()), job
    )


def as_planned(
    engine: Whole, rows: Mapping[str, Row], plan: BatchPlan, *, terms: bool = True, **said: Any
) -> Found:
    """The micro-batches of all ranks, in turn."""
    loss = RealRowsLoss(policy_loss("token-mean", terms=terms))
    return _computed(
        engine, loss, cut_as_planned(rows, plan, UPDATE, 0, token_budget=BUDGET, **said)
    )


def of_pass(engine: Whole, rows: Mapping[str, Row], plan: BatchPlan) -> dict[str, torch.Tensor]:
    """Log-probs of the pass before the update, with the module as it is for one."""
    engine.module.eval()
    found = {}
    for keys, data in cut_as_planned(rows, plan, PASS, 0, token_budget=BUDGET):
        with torch.no_grad():
            _, output = engine.forward_step(data, None, forward_only=True)
        found |= dict(zip(keys, _responses(output, data).unbind(), strict=True))
    engine.module.train()
    return found


def _computed(engine: Whole, loss: Any, micro_batches: Iterator[Any]) -> Found:
    log_probs = {}
    for keys, data in micro_batches:
        value, output = engine.forward_step(data, loss, forward_only=False)
        (value / data["dp_size"]).backward()
        of_rows = _responses(output, data).detach().unbind()
        log_probs |= {key: row.double() for key, row in zip(keys, of_rows, strict=True)}
    return {key: row for key, row in log_probs.items() if key}, engine.take_gradient().double()


def off(found: Found, wanted: Found) -> dict[str, float]:
    """How far log-probs and gradient are off those wanted, relative to their norms."""
    return {
        name: float((a - b).norm() / b.norm())
        for name, a, b in (
            (
                "log_probs",
                *(torch.cat([of[0][key] for key in wanted[0]]) for of in (found, wanted)),
            ),
            ("gradient", found[1], wanted[1]),
        )
    }


def measure(model: Path, rows: Mapping[str, Row], dtype: str, exact: Found) -> dict[str, Any]:
    """The differences of one dtype from the rows alone in float64, ``exact``; those of skipped rows
    from the same plan with them."""
    figures: dict[str, Any] = {}
    module = load(model, dtype)
    if dtype != "float64":
        figures["rows alone"] = off(alone(engine_of(module, dtype, shares=False), rows), exact)
    engine = engine_of(module, dtype, shares=True)
    for name, sharing in (("pads", "off"), ("pads, shared prefixes", "on")):
        plan = planned(rows, sharing)
        found, before = as_planned(engine, rows, plan), of_pass(engine, rows, plan)
        of_plan = plan.figures[UPDATE]
        figures[name] = off(found, exact) | {
            "pads": of_plan.pads,
            "sharing_factor": round(of_plan.sharing_factor or 1.0, 2),
            # 0 in the update that follows its own pass: the ratio of the two is 1.
            "largest_log_ratio": max(
                float((before[key].double() - row).abs().max()) for key, row in found[0].items()
            ),
        }
    zero_advantage = rows_of_prompts(rows, "0")
    every, some = (
        as_planned(engine, rows, plan, terms=False, **said)
        for plan, said in (
            (planned(rows, "on"), {}),
            (planned(rows, "on", zero_advantage), {"leaves_out": True}),
        )
    )
    assert len(every[0]) - len(some[0]) == len(zero_advantage)
    figures["zero-advantage rows skipped"] = off((every[0], some[1]), every)
    return figures


def main(keep: Keep = False) -> None:
    """Measures each dtype."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "smollm2")
        make_smollm2(model)
        rows, exact = rows_and_exact(model)
        figures = {dtype: measure(model, rows, dtype, exact) for dtype in DTYPES}
    tokens = sum(len(row["input_ids"]) for row in rows.values())
    ratio = max(
        of["largest_log_ratio"] for each in figures.values() for of in each.values() if "pads" in of
    )
    said = {"rows": len(rows), "tokens": tokens, "largest_log_ratio": ratio}
    report("real_text", said | figures, keep=keep)


def rows_and_exact(model: Path) -> tuple[dict[str, Row], Found]:
    """The rows, and what each gives alone in float64."""
    engine = engine_of(load(model, "float64"), "float64", shares=False)
    rows = with_old_log_probs(engine, play_sessions(model))
    return rows, alone(engine, rows)


if __name__ == "__main__":
    typer.run(main)
