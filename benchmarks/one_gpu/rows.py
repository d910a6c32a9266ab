"""Rows as agents make them, of random tokens, and the plan of a batch of them."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from verl_padding.pads.template import PadTemplate
from verl_padding.plan import Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import uid_of_key
from verl_padding.prefix_sharing.row_inputs import RowInputs

Texts = dict[str, tuple[list[int], list[int]]]
"""Key of a row, as verl makes it -> tokens of its prompt and of its response."""

SAID = {
    "temperature": 1.0,
    "distillation_use_topk": False,
    "distillation_only": False,
    "seed": 1,
    "epochs": 1,
}
"""What verl's trainer says to its workers."""
Row = Mapping[str, torch.Tensor]
"""Fields of a row."""


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def trained_rows(texts, dtype=torch.float64):
    """Rows with all that an update of actor or critic reads, of the tokens of prompts and
    responses."""
    draw = torch.Generator().manual_seed(0)

    def column(n, scale=1.0):
        return (torch.randn(n, generator=draw, dtype=torch.float64) * scale).to(dtype)

    rows = {}
    for key, (prompt, response) in texts.items():
        n, mask = len(response), torch.ones(len(response), dtype=torch.int64)
        old = column(n, 0.1) - 5.6
        rows[key] = {
            "prompts": torch.tensor(prompt),
            "responses": torch.tensor(response),
            "input_ids": torch.tensor(prompt + response),
            "position_ids": torch.arange(len(prompt) + n),
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": old,
            "ref_log_prob": old + column(n, 0.1),
            "rollout_log_probs": old + column(n, 0.1),
            "advantages": column(n),
            "values": column(n, 0.1),
            "returns": column(n),
        }
    return rows


def pad_of(rows):
    """A pad beside some rows."""
    columns = PadTemplate(eos_token_id=3, length=2).fields(rows)
    return {name: column[0] for name, column in columns.items()}


def micro_batch_of(rows):
    """Rows as verl's workers have them: every field is jagged, even that of a single row."""
    return TensorDict(
        {name: nested([row[name] for row in rows]) for name in rows[0]}, batch_size=len(rows)
    )


def sessions(
    draw,
    prompts,
    *,
    scale,
    vocabulary,
    turns,
    grows=False,
):
    """Two sessions of a prompt, each call of the model a row.

    Earlier reasoning is left out of later prompts, as chat templates of thinking models do, unless
    the context grows.
    """
    rows = {}
    for prompt in range(prompts):
        first = tokens(draw, 800 * scale, vocabulary)
        for session in range(2):
            context = first
            for turn in range(turns):
                thought, answer, reply = (
                    tokens(draw, n * scale, vocabulary) for n in (300, 100, 250)
                )
                rows[f"{'g' if grows else 't'}{prompt}_{session}_{turn}"] = (
                    context,
                    thought + answer,
                )
                context = context + (thought if grows else []) + answer + reply
    return rows


def rollouts(draw, prompts, number, *, scale, vocabulary):
    """Rollouts of prompts of 4,000 tokens, with responses of 500 to 1,500."""
    firsts = [tokens(draw, 4_000 * scale, vocabulary) for _ in range(prompts)]
    return {
        f"p{prompt}_{n}_0": (first, tokens(draw, draw.uniform(500, 1_500) * scale, vocabulary))
        for prompt, first in enumerate(firsts)
        for n in range(number)
    }


def tokens(draw, number, vocabulary):
    """The first tokens are special ones."""
    return [draw.randrange(5, vocabulary) for _ in range(max(1, round(number)))]


def rows_of_prompts(keys, prompts):
    """Numbers of the rows of some prompts, each a digit."""
    return [number for number, key in enumerate(keys) if uid_of_key(key)[1:] in prompts]


def plan(
    rows,
    budget,
    *,
    sharing="off",
    ranks=1,
    has_pass=False,
    mini_prompts=None,
    packer="plan",
    **row_options,
):
    """One mini-batch of all rows, or several of ``mini_prompts`` prompts; ``row_options``: more
    for `Rows.from_keys`."""
    keys = list(rows)
    inputs = RowInputs(micro_batch_of(list(rows.values())))
    tries = PrefixTries.from_tokens(inputs.ids_R, list(map(uid_of_key, keys)))
    prompts = len({uid_of_key(key) for key in keys})
    shape = {
        "prompts": prompts,
        "sessions": 2,
        "mini_prompts": mini_prompts or prompts,
        "ranks": ranks,
        "budget": budget,
    }
    drops_zero_advantage = bool(row_options.get("zero_advantage"))
    job = job_of(
        **shape,
        has_pass=has_pass,
        drops_zero_advantage=drops_zero_advantage,
        packer=packer,
        sharing=sharing,
    )
    return plan_batch(Rows.from_keys(keys, tries.tokens_R.tolist(), tries, **row_options), job)


def job_of(
    *,
    prompts,
    sessions,
    mini_prompts,
    ranks,
    budget,
    has_pass=False,
    drops_zero_advantage=False,
    strategy="prompt",
    **job_options,
):
    """A job of an actor's update, and of the pass before it."""
    shape: dict[str, Any] = {"dp_size": ranks, "token_budget": budget}
    return Job(
        strategy=strategy,
        prompts=prompts,
        sessions_per_prompt=sessions,
        updates={
            "actor": Update(
                **shape,
                prompts_per_mini_batch=mini_prompts,
                drops_zero_advantage=drops_zero_advantage,
            )
        },
        inference={"log_prob": Pass(**shape, as_update="actor")} if has_pass else {},
        **job_options,
    )
