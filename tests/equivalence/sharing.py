"""Updates of two real ranks on a CPU: each row computed by itself, and shared prefixes once.

    python -m tests.equivalence.sharing fsdp2|linear_attention|megatron|veomni [--keep]

The last two take ``VERL_USE_EXTERNAL_MODULES=tests.support.engines``.

Sessions of 4 and 8 model calls on average (long-tailed), each a row, whose reasoning is left out of
later prompts; eight rollouts of each prompt; and rows that share nothing. The model, a Qwen2 of two
layers, is wide enough that most of what a token takes is linear layers; *linear_attention* has a
Qwen3.5's text model, and texts four times as long. *megatron* and *veomni* run without their
kernels, on two ranks of tensor and of data parallelism.

verl's own worker, engine and loss make the updates. Both sides take turns in one job, in one order
and the other, each from the model's weights, on the same rows; a first round is not kept. CPU
seconds of both ranks count neither ranks that wait nor other work on the machine.
"""

import random
import tempfile
import time
from math import isclose
from pathlib import Path

import torch
import transfer_queue as tq
import typer
from tensordict import TensorDict

from benchmarks.one_gpu.rows import SAID, job_of, micro_batch_of, trained_rows
from benchmarks.ray_and_queue import ray_and_queue
from benchmarks.results import Keep, busy_cores, report
from verl_padding.plan import Rows, plan_batch
from verl_padding.plan.row_keys import row_key

RANKS, BUDGET, LONGER = 2, 1024, 4
VOCABULARY = 260
"""That of the tokenizer, and one token more, since ranks may halve it."""
ACTOR = "actor_rollout_ref.actor"
ENGINES = {
    "fsdp2": (),
    "linear_attention": (),
    "megatron": ("+local=cpu_megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"),
    "veomni": ("+local=cpu_veomni", f"{ACTOR}.optim.lr_scheduler_type=constant"),
}


def random_tokens(draw, least, most):
    return [draw.randrange(5, 200) for _ in range(draw.randint(least, most))]


def thinking(calls, seed, prompts, sessions, tokens, scale=1):
    """Sessions with a row a call, whose reasoning is left out of later prompts."""
    draw, rows = random.Random(seed), {}
    for prompt in range(prompts):
        first = random_tokens(draw, *tokens)
        for session in range(sessions):
            context = list(first)
            for call in range(max(1, round(calls * draw.lognormvariate(-0.125, 0.5)))):
                thought, answer = (
                    random_tokens(draw, 10 * scale, most * scale) for most in (60, 45)
                )
                if len(context) + len(thought) + len(answer) > BUDGET * scale:
                    break
                rows[row_key(f"p{prompt}", session, call)] = list(context), thought + answer
                context += answer + random_tokens(draw, 10 * scale, 30 * scale)
    return rows


def rollouts(seed, prompts, tokens, own=False):
    """Eight sessions of a row; ``own``: with a prompt of their own."""
    draw, rows = random.Random(seed), {}
    for prompt in range(prompts):
        first = random_tokens(draw, *tokens)
        for session in range(8):
            asked = random_tokens(draw, 100, 300) if own else list(first)
            rows[row_key(f"p{prompt}", session, 0)] = asked, random_tokens(draw, 60, 140)
    return rows


def cases(engine):
    """The rows of each case of an engine."""
    four, eight, rolled, alone = (
        "4 turns that think",
        "8 turns that think",
        "8 rollouts of a prompt",
        "nothing to share",
    )
    if engine == "linear_attention":
        return {
            four: thinking(4, 4, RANKS, 4, (100, 200), LONGER),
            eight: thinking(8, 8, RANKS, 2, (100, 200), LONGER),
        }
    return {
        four: thinking(4, four, 3, 8, (20, 60)),
        eight: thinking(8, eight, 2, 8, (20, 60)),
        rolled: rollouts(rolled, 11, (300, 500)),
        alone: rollouts(alone, 6, (1, 1), own=True),
    }


def budget(engine):
    """Tokens of a micro-batch, and of a row at most."""
    return BUDGET * LONGER if engine == "linear_attention" else BUDGET


def cpu_seconds(workers):
    """CPU seconds of all ranks since they were started."""
    from verl.protocol import DataProto

    def read(_):
        value = torch.tensor([time.process_time()], dtype=torch.float64)
        return DataProto(batch=TensorDict({"seconds": value}, batch_size=1))

    return float(workers.execute_with_func_generator(read).batch["seconds"].sum())


def start_over(workers):
    """Gives the workers the model's weights and a new optimizer."""
    from verl.protocol import DataProto

    def reset(worker):
        worker.actor.reset()
        return DataProto()

    workers.execute_with_func_generator(reset)


def update(workers, texts, sharing, tokens):
    """Makes an update of one optimizer step: its gradient norm, and the plan's sharing factor."""
    from tests.support.padded_group import padded_group
    from tests.support.padded_rows import upsample
    from verl_padding.driver.worker_calls import dp_size
    from verl_padding.pads.template import PadTemplate
    from verl_padding.pads.upsampling import strip
    from verl_padding.prefix_sharing.detection import PrefixDetection

    tags = [
        {"prompt_len": len(asked), "response_len": len(said), "seq_len": len(asked + said)}
        for asked, said in texts.values()
    ]
    fields = micro_batch_of([*trained_rows(texts, torch.float32).values()])
    batch = tq.kv_batch_put(keys=[*texts], partition_id="train", fields=fields, tags=tags)
    shares, ranks = sharing == "on", dp_size(workers, "actor")
    shape = {"sessions": len(batch), "ranks": ranks, "budget": tokens, "sharing": sharing}
    job = job_of(prompts=1, mini_prompts=1, packer="plan", **shape)
    tokens_R = [tag["seq_len"] for tag in tags]
    tries = PrefixDetection(batch).by_outputs if shares else None
    plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, tries=tries), job)
    padded = upsample(batch, plan, PadTemplate(eos_token_id=3, length=2))
    batch.extra_info |= SAID | {
        "calculate_entropy": False,
        "dataloader_kwargs": {"shuffle": False},
        "global_batch_size": len(batch),
        "mini_batch_size": len(batch),
    }
    (norm,) = padded_group(workers, padded).update_actor(batch)["metrics"]["grad_norm"]
    assert norm > 0, f"an optimizer step learns nothing: gradient norm {norm}"
    strip(padded.pads)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    return {"grad_norm": norm, "sharing_factor": plan.figures["actor"].sharing_factor}


def measure(workers, name, texts, tokens, repeats):
    """What each round of each side took."""
    sides = {"off": [], "on": []}
    for number in range(repeats + 1):
        for sharing, rounds in [*sides.items()][:: 1 if number % 2 else -1]:
            start_over(workers)
            before = cpu_seconds(workers)
            took = update(workers, texts, sharing, tokens)
            if number:
                rounds.append(took | {"cpu": cpu_seconds(workers) - before})
    apart, shared = (rounds[-1]["grad_norm"] for rounds in sides.values())
    assert isclose(apart, shared, rel_tol=1e-3), f"{name}: gradient norms {apart} and {shared}"
    return {"rows": len(texts), "sides": sides}


def main(engine: str, repeats: int = 3, keep: Keep = False) -> None:
    """Measures the updates of all cases of an engine."""
    busy, tokens = busy_cores(), budget(engine)
    with ray_and_queue(object_store_bytes=2_000_000_000), tempfile.TemporaryDirectory() as folder:
        from benchmarks.one_gpu.rank import make_model
        from tests.support.actor_workers import start_actor, stop

        kind = "qwen3_5_text" if engine == "linear_attention" else "qwen2"
        model = make_model(Path(folder), "wide", kind, VOCABULARY, "cpu")
        sizes = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}")
        workers = start_actor(model, RANKS, *sizes, *ENGINES[engine])
        found = {
            name: measure(workers, name, texts, tokens, repeats)
            for name, texts in cases(engine).items()
        }
        stop(workers)
    report(f"sharing {engine}", {"cases": found}, keep=keep, busy=busy)


if __name__ == "__main__":
    typer.run(main)
