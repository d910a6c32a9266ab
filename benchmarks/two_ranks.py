"""Two real ranks on a CPU, of FSDP2 unless settings say otherwise, whose updates are timed side by
side.

A Qwen2 of two layers, or a Qwen3.5's text model, whose first one is linear attention; verl's own
worker, engine and loss. CPU seconds of both ranks count neither ranks that wait nor other work on
the machine.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from tensordict import TensorDict

from benchmarks.ray_and_queue import ray_and_queue
from benchmarks.update_sides import RANKS

VOCABULARY = 260
"""That of the tokenizer, and one token more, since ranks may halve it."""


@contextmanager
def two_ranks(hidden, budget, kind="qwen2", settings=()):
    """The workers of an actor: a model of this width and kind, and micro-batches of ``budget``
    tokens; ``settings`` choose an engine."""
    with ray_and_queue(object_store_bytes=2_000_000_000), tempfile.TemporaryDirectory() as folder:
        from benchmarks.actor_workers import start_actor, stop
        from benchmarks.one_gpu.rank import make_model

        model = make_model(Path(folder), f"wide {hidden}", kind, VOCABULARY, "cpu")
        actor = "actor_rollout_ref.actor"
        budget_settings = (
            f"{actor}.use_dynamic_bsz=true",
            f"{actor}.ppo_max_token_len_per_gpu={budget}",
        )
        workers = start_actor(model, RANKS, *budget_settings, *settings)
        yield workers
        stop(workers)


def start_side(workers, side):
    """Gives the workers the model's weights and a new optimizer: a call says how they compute."""
    from verl.protocol import DataProto

    def start_over(worker):
        worker.actor.reset()
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        return DataProto()

    workers.execute_with_func_generator(start_over)


def cpu_seconds(workers):
    """CPU seconds of all ranks since they were started."""
    return float(_of_ranks(workers, time.process_time).sum())


def peak_mib(workers):
    """The most memory of a rank since a side was started, in MiB."""

    def read():
        (line,) = (
            each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each
        )
        return int(line.split()[1]) / 1024

    return float(_of_ranks(workers, read).max())


def _of_ranks(workers, read):
    """What a function without arguments gives in each rank, as shape (ranks,)."""
    from verl.protocol import DataProto

    def answer(worker):
        value = torch.tensor([read()], dtype=torch.float64)
        return DataProto(batch=TensorDict({"value": value}, batch_size=1))

    return workers.execute_with_func_generator(answer).batch["value"]
