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
from pathlib import Path

import pandas as pd
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.utils.padding import response_from_nested

from benchmarks.one_gpu.rows import plan as plan_rows
from benchmarks.one_gpu.rows import rows_of_prompts
from benchmarks.results import Keep, report
from tests.support.engine_in_process import (
    Actor,
    cut_as_planned,
    in_float64,
    one_micro_batch,
    start_engine,
    trained_rows,
)
from tests.support.losses_on_rows import policy_loss
from tests.support.played import play
from verl_padding.recipes.guess.guess_loop import GUESSES, GuessLoop
from verl_padding.recipes.guess.make_data import write_data
from verl_padding.recipes.guess.smollm2 import make_smollm2
from verl_padding.worker.losses import RealRowsLoss, normalize_over_mini_batch

PROMPTS, SESSIONS, RANKS, BUDGET = 3, 3, 4, 512
AUTOCAST = "float32 weights, bfloat16 autocast"
DTYPES = {"float64": torch.float64, "float32": torch.float32, AUTOCAST: torch.float32}
UPDATE, PASS = "actor", "log_prob"


def play_sessions(model):
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
    rows = trained_rows(texts)
    keys = list(rows)
    for number in rows_of_prompts(keys, "0"):
        row = rows[keys[number]]
        row["advantages"] = torch.zeros_like(row["advantages"])
    return rows


def load(model, dtype):
    module = AutoModelForCausalLM.from_pretrained(
        model, dtype=DTYPES[dtype], attn_implementation="sdpa"
    )
    return in_float64(module) if dtype == "float64" else module


def engine_of(module, dtype, *, shares):
    engine = start_engine(Actor, module, shares=shares)
    if dtype == AUTOCAST:
        engine._autocast_dtype = torch.bfloat16
    return engine


def log_probs(output, micro_batch):
    """Of the response of each row, cut out as verl's trainer does it."""
    found = response_from_nested(output["model_output"]["log_probs"], micro_batch["response_mask"])
    return found.detach().clone().unbind()


def log_probs_of_a_pass(engine, micro_batches):
    """By key, with the module as it is for a pass before an update."""
    engine.module.eval()
    found = {}
    for keys, data in micro_batches:
        with torch.no_grad():
            _, output = engine.forward_step(data, None, forward_only=True)
        found |= dict(zip(keys, log_probs(output, data), strict=True))
    engine.module.train()
    found.pop(None, None)  # of pads
    return found


def with_old_log_probs(engine, rows):
    """The rows with the model's own log-probs, moved by what `trained_rows` has drawn."""
    each_alone = (([key], one_micro_batch([row], [row])) for key, row in rows.items())
    return {
        key: rows[key]
        | {name: rows[key][name] + 5.6 + own.double() for name in ("old_log_probs", "ref_log_prob")}
        for key, own in log_probs_of_a_pass(engine, each_alone).items()
    }


def computed(engine, loss, micro_batches):
    """Log-probs of the response of each row, and the gradient."""
    found = {}
    for keys, data in micro_batches:
        value, output = engine.forward_step(data, loss, forward_only=False)
        (value / data["dp_size"]).backward()
        of_rows = (row.double() for row in log_probs(output, data))
        found |= dict(zip(keys, of_rows, strict=True))
    found.pop(None, None)  # of pads
    return found, engine.take_gradient().double()


def alone(engine, rows):
    """What each row gives by itself."""
    every = list(rows.values())
    loss = normalize_over_mini_batch(policy_loss("token-mean"))
    each_alone = (([key], one_micro_batch([row], every)) for key, row in rows.items())
    return computed(engine, loss, each_alone)


def planned(rows, **how):
    """One mini-batch of all rows."""
    return plan_rows(rows, BUDGET, ranks=RANKS, **how)


def as_planned(engine, rows, plan, *, terms=True, **said):
    """What the micro-batches of all ranks give, in turn."""
    loss = RealRowsLoss(policy_loss("token-mean", terms=terms))
    return computed(
        engine, loss, cut_as_planned(rows, plan, UPDATE, 0, token_budget=BUDGET, **said)
    )


def off(found, wanted):
    """How far log-probs and gradient are off those wanted, relative to their norms."""
    log_probs = (torch.cat([of[0][key] for key in wanted[0]]) for of in (found, wanted))
    return {
        name: float((a - b).norm() / b.norm())
        for name, (a, b) in (("log_probs", log_probs), ("gradient", (found[1], wanted[1])))
    }


def measure(model, rows, dtype, exact):
    """The differences of one dtype from the rows alone in float64, ``exact``; those of skipped rows
    from the same plan with them."""
    figures = {}
    module = load(model, dtype)
    if dtype != "float64":
        figures["rows alone"] = off(alone(engine_of(module, dtype, shares=False), rows), exact)
    engine = engine_of(module, dtype, shares=True)
    for name, sharing in (("pads", "off"), ("pads, shared prefixes", "on")):
        plan = planned(rows, sharing=sharing, has_pass=True)
        found = as_planned(engine, rows, plan)
        before = log_probs_of_a_pass(
            engine, cut_as_planned(rows, plan, PASS, 0, token_budget=BUDGET)
        )
        of_plan = plan.figures[UPDATE]
        figures[name] = off(found, exact) | {
            "pads": plan.layouts[UPDATE].n_pads,
            "sharing_factor": round(of_plan.sharing_factor or 1.0, 2),
            # 0 in the update that follows its own pass: the ratio of the two is 1.
            "largest_log_ratio": max(
                float((before[key].double() - row).abs().max()) for key, row in found[0].items()
            ),
        }
    zero_advantage = rows_of_prompts(rows, "0")
    plan = planned(rows, sharing="on", has_pass=True)
    every = as_planned(engine, rows, plan, terms=False)
    plan = planned(rows, sharing="on", zero_advantage=zero_advantage)
    some = as_planned(engine, rows, plan, terms=False, drops_rows=True)
    assert len(every[0]) - len(some[0]) == len(zero_advantage)
    figures["zero-advantage rows skipped"] = off((every[0], some[1]), every)
    return figures


def rows_and_exact(model):
    """The rows, and what each gives alone in float64."""
    engine = engine_of(load(model, "float64"), "float64", shares=False)
    rows = with_old_log_probs(engine, play_sessions(model))
    return rows, alone(engine, rows)


def main(keep: Keep = False) -> None:
    """Measures each dtype."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "smollm2")
        make_smollm2(model)
        rows, exact = rows_and_exact(model)
        figures = {dtype: measure(model, rows, dtype, exact) for dtype in DTYPES}
    tokens = sum(len(row["input_ids"]) for row in rows.values())
    report("real_text", {"rows": len(rows), "tokens": tokens} | figures, keep=keep)


if __name__ == "__main__":
    typer.run(main)
