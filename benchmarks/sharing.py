"""Updates of two real ranks on a CPU: each row computed by itself, and shared prefixes once.

    python -m benchmarks.sharing fsdp2|linear_attention [--keep]
    VERL_USE_EXTERNAL_MODULES=tests.support.engines python -m benchmarks.sharing megatron|veomni

*fsdp2*: sessions of 2, 4 and 8 model calls on average (long-tailed), each a row, whose reasoning is
left out of later prompts; eight rollouts of each prompt; and rows that share nothing. Each case has
some 12,000 tokens that are unlike. The model, a Qwen2 of two layers, is wide enough that most of
what a token takes is linear layers. *megatron* and *veomni* are the same on these engines without
their kernels, on two ranks of tensor and of data parallelism.

*linear_attention*: the sessions of 4 and 8 calls, of texts four times as long, by a Qwen3.5's text
model.

verl's own worker, engine and loss make the updates. Both sides take turns in one job, in one order
and the other, each from the model's weights, on the same rows, put anew, and attend row by row, as
``+local=cpu`` does; a first round is not kept. CPU seconds of both ranks count neither ranks that
wait nor other work on the machine.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
import typer
from rich.progress import track
from tensordict import TensorDict

from benchmarks.one_gpu.rows import SAID, Texts, job_of, micro_batch_of, trained_rows
from benchmarks.ray_and_queue import ray_and_queue
from benchmarks.results import Keep, busy_cores, report
from verl_padding.plan import Rows, plan_batch
from verl_padding.plan.row_keys import row_key

RANKS, EOS = 2, 3
BUDGET, LONGER = 1024, 4
VOCABULARY = 260
"""That of the tokenizer, and one token more, since ranks may halve it."""


def random_tokens(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(5, 200) for _ in range(draw.randint(least, most))]


Session = Callable[[random.Random, list[int], str, int], Texts]
"""Draws the rows of a session of a prompt."""


def thinking_session(
    calls: int, draw: random.Random, first: list[int], prompt: str, session: int, scale: int = 1
) -> Texts:
    """A row a call, whose reasoning is left out of later prompts."""
    rows: Texts = {}
    context = list(first)
    for call in range(max(1, round(calls * draw.lognormvariate(-0.125, 0.5)))):
        thought, answer = (random_tokens(draw, 10 * scale, most * scale) for most in (60, 45))
        if len(context) + len(thought) + len(answer) > BUDGET * scale:
            break
        rows[row_key(prompt, session, call)] = list(context), thought + answer
        context += answer + random_tokens(draw, 10 * scale, 30 * scale)
    return rows


def rollout(draw: random.Random, first: list[int], prompt: str, session: int) -> Texts:
    """The one row of a session."""
    return {row_key(prompt, session, 0): (list(first), random_tokens(draw, 60, 140))}


def alone(draw: random.Random, first: list[int], prompt: str, session: int) -> Texts:
    """A row whose prompt is its own."""
    return rollout(draw, random_tokens(draw, 100, 300), prompt, session)


def case_of(
    seed: str | int, session: Session, prompts: int, sessions: int, tokens: tuple[int, int]
) -> Texts:
    """Draws the rows of so many sessions of each prompt, which has least and most ``tokens``."""
    draw = random.Random(seed)
    rows: Texts = {}
    for prompt in range(prompts):
        first = random_tokens(draw, *tokens)
        for number in range(sessions):
            rows |= session(draw, first, f"p{prompt}", number)
    return rows


def cases() -> dict[str, Texts]:
    """Sessions that think, rollouts, and rows that share nothing."""
    drawn: dict[str, tuple[Session, int, tuple[int, int]]] = {
        "2 turns that think": (partial(thinking_session, 2), 7, (20, 60)),
        "4 turns that think": (partial(thinking_session, 4), 3, (20, 60)),
        "8 turns that think": (partial(thinking_session, 8), 2, (20, 60)),
        "8 rollouts of a prompt": (rollout, 11, (300, 500)),
        "nothing to share": (alone, 6, (1, 1)),
    }
    return {
        name: case_of(name, session, prompts, 8, tokens)
        for name, (session, prompts, tokens) in drawn.items()
    }


def longer_cases() -> dict[str, Texts]:
    """Sessions that think at length."""
    return {
        f"{calls} turns that think": case_of(
            calls, partial(thinking_session, calls, scale=LONGER), RANKS, sessions, (100, 200)
        )
        for calls, sessions in ((4, 4), (8, 2))
    }


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are measured on one engine."""

    cases: Callable[[], dict[str, Texts]] = cases
    budget: int = BUDGET
    kind: str = "qwen2"
    settings: tuple[str, ...] = ()
    """Those of an engine other than FSDP2's."""


ACTOR = "actor_rollout_ref.actor"
TENSOR = ("+local=cpu_megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2")
VEOMNI = ("+local=cpu_veomni", f"{ACTOR}.optim.lr_scheduler_type=constant")
GROUPS = {
    "fsdp2": Group(),
    "linear_attention": Group(cases=longer_cases, budget=BUDGET * LONGER, kind="qwen3_5_text"),
    "megatron": Group(settings=TENSOR),
    "veomni": Group(settings=VEOMNI),
}


def start_over(workers):
    """Gives the workers the model's weights and a new optimizer."""
    from verl.protocol import DataProto

    def reset(worker):
        worker.actor.reset()
        return DataProto()

    workers.execute_with_func_generator(reset)


def cpu_seconds(workers):
    """CPU seconds of all ranks since they were started."""
    from verl.protocol import DataProto

    def read(_):
        value = torch.tensor([time.process_time()], dtype=torch.float64)
        return DataProto(batch=TensorDict({"seconds": value}, batch_size=1))

    return float(workers.execute_with_func_generator(read).batch["seconds"].sum())


def put(texts):
    """The rows in TransferQueue, with all that an update reads."""
    tags = [
        {
            "prompt_len": len(prompt),
            "response_len": len(response),
            "seq_len": len(prompt + response),
        }
        for prompt, response in texts.values()
    ]
    fields = micro_batch_of([*trained_rows(texts, torch.float32).values()])
    return tq.kv_batch_put(keys=[*texts], partition_id="train", fields=fields, tags=tags)


def update(workers, texts, sharing, budget):
    """Makes an update of one optimizer step: its gradient norm, and the plan's sharing factor."""
    from benchmarks.one_step import padded_group
    from verl_padding.driver.worker_calls import dp_size
    from verl_padding.pads.padded_batch import PaddedBatch
    from verl_padding.pads.template import PadTemplate
    from verl_padding.pads.upsampling import strip
    from verl_padding.prefix_sharing.detection import PrefixDetection

    batch = put(texts)
    job = job_of(
        prompts=1,
        sessions=len(batch),
        mini_prompts=1,
        ranks=dp_size(workers, "actor"),
        budget=budget,
        packer="plan",
        sharing=sharing,
    )
    shares = sharing == "on"
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    tries = PrefixDetection(batch, tokens_R).by_outputs if shares else None
    plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, tries=tries), job)
    template = PadTemplate(eos_token_id=EOS, length=2)
    padded = PaddedBatch(batch, plan, template, may_branch=True if shares else None)
    padded.put_pads()
    norm = train(padded_group(workers, padded), batch)
    strip(padded.pads)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    return {"grad_norm": norm, "sharing_factor": plan.figures["actor"].sharing_factor}


def train(workers, batch):
    """The gradient norm of an update of all rows."""
    batch.extra_info |= SAID | {
        "calculate_entropy": False,
        "dataloader_kwargs": {"shuffle": False},
        "global_batch_size": len(batch),
        "mini_batch_size": len(batch),
    }
    (norm,) = workers.update_actor(batch)["metrics"]["grad_norm"]
    assert norm > 0, f"an optimizer step learns nothing: gradient norm {norm}"
    return float(norm)


def measure(workers: Any, name: str, texts: Texts, budget: int, repeats: int) -> dict[str, Any]:
    """What each round of each side took."""
    sides: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for number in track(range(repeats + 1), name):
        for sharing, rounds in [*sides.items()][:: 1 if number % 2 else -1]:
            start_over(workers)
            before = cpu_seconds(workers)
            took = update(workers, texts, sharing, budget)
            if number:
                rounds.append(took | {"cpu": cpu_seconds(workers) - before})
    apart, shared = (rounds[-1]["grad_norm"] for rounds in sides.values())
    assert isclose(apart, shared, rel_tol=1e-3), f"{name}: gradient norms {apart} and {shared}"
    return {"rows": len(texts), "sides": sides}


def main(group: str, repeats: int = 3, keep: Keep = False) -> None:
    """Measures the updates of all cases of a group."""
    busy, it = busy_cores(), GROUPS[group]
    with ray_and_queue(object_store_bytes=2_000_000_000), tempfile.TemporaryDirectory() as folder:
        from benchmarks.actor_workers import start_actor, stop
        from benchmarks.one_gpu.rank import make_model

        model = make_model(Path(folder), "wide", it.kind, VOCABULARY, "cpu")
        sizes = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu={it.budget}")
        workers = start_actor(model, RANKS, *sizes, *it.settings)
        found = {
            name: measure(workers, name, texts, it.budget, repeats)
            for name, texts in it.cases().items()
        }
        stop(workers)
    report(f"sharing {group}", {"cases": found}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
