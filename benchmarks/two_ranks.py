"""Two real FSDP2 ranks on a CPU, whose updates are timed side by side.

A Qwen2 of two layers; verl's own worker, engine and loss. Sides take turns in one job, in one order and the other, each
from the model's weights, on the same rows, put anew. CPU seconds of both ranks count neither ranks that wait nor other
work on the machine; seconds on the clock stand beside them, and the most memory that a rank held.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from tensordict import TensorDict

from benchmarks.results import console
from benchmarks.updates import RANKS, Side
from tests.support.cluster import ray_and_queue


@contextmanager
def two_ranks(hidden: int, longest: int, budget: int | None = None) -> Iterator[Any]:
    """The workers of an actor: a model of this width, for rows of at most ``longest`` tokens and, in a micro-batch of a
    rank, ``budget``, or as many as a row."""
    with ray_and_queue(object_store_bytes=2_000_000_000), tempfile.TemporaryDirectory() as folder:
        from tests.support.fsdp2_workers import start_actor, stop
        from verl_padding.worker import mini_batches
        from verl_padding.worker.losses import wrap_worker_loss

        budget_setting = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget or longest}"
        workers = start_actor(make_model(Path(folder), hidden, longest), RANKS, budget_setting)
        # It lets rows that no plan has touched pass: stock verl's side runs verl's own loss.
        workers.execute_with_func_generator(wrap_worker_loss("rows"))
        workers.execute_with_func_generator(mini_batches.install_in_worker)
        yield workers
        stop(workers)


def take_turns(
    workers: Any,
    sides: Sequence[Side],
    update: Callable[[Side], dict[str, Any]],
    rounds: Iterable[int],
    name: str,
    *,
    warm_up: bool = True,
) -> dict[str, list[dict[str, Any]]]:
    """What each round of each side took, by the side's name.

    Args:
        update: puts the rows, and makes the update of a side.
        name: of the progress bar.
        warm_up: whether round 0 is not kept.
    """
    kept: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for number in track(rounds, name, console=console):
        for side in sides if number % 2 else reversed(sides):
            start_side(workers, side)
            start_peak(workers)
            before = cpu_seconds(workers)
            took = update(side) | {"cpu": cpu_seconds(workers) - before, "memory_gib": peak_of(workers) / 2**30}
            if number or not warm_up:
                kept[side.name].append(took)
    return kept


def make_model(folder: Path, hidden: int, longest: int) -> Path:
    """A Qwen2 of two layers of random weights, for rows of at most so many tokens."""
    import transformers

    from verl_padding.on_cpu.tiny_models import make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start_side(workers: Any, side: Side) -> None:
    """Gives the workers the model's weights and a new optimizer, and has them compute and cut as a side does."""
    from verl.protocol import DataProto

    from tests.support.fsdp2_workers import start_over
    from verl_padding.job.attention import PACKED
    from verl_padding.worker.plan_packer import install

    def pack(worker: Any) -> Any:
        # verl's TrainingWorker.train_batch takes this one from the model.
        object.__setattr__(worker.actor.model_config, "use_remove_padding", side.packs)
        return DataProto()

    start_over([workers], "token-mean", side.micro_batch_rows, terms=side.has_terms)

    def attend(worker: Any) -> Any:
        # transformers' own has a mask over a micro-batch, and computes all pairs of its tokens.
        name = "sdpa" if side.attention == "all pairs" else PACKED
        worker.actor.engine.module.config._attn_implementation = name
        return DataProto()

    for setup in (pack, attend, install(side.sharing)):
        workers.execute_with_func_generator(setup)


def start_peak(workers: Any) -> None:
    """Gives memory that workers hold but do not use back to the system, and starts their peaks anew.

    Linux and glibc alone can do it.
    """
    from verl_padding.driver import worker_calls

    def start(worker: Any) -> Any:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return worker_calls.start_peak(worker)

    workers.execute_with_func_generator(start)


def peak_of(workers: Any) -> int:
    """Most bytes that a worker has held since :func:`start_peak`: resident, model and libraries among them."""
    from verl.protocol import DataProto
    from verl.utils.device import get_torch_device

    def read(worker: Any) -> Any:
        peak = torch.tensor([get_torch_device().max_memory_allocated()])
        return DataProto(batch=TensorDict({"bytes": peak}, batch_size=1))

    return int(workers.execute_with_func_generator(read).batch["bytes"].max())


def cpu_seconds(workers: Any) -> float:
    """CPU seconds of all ranks since they were started."""
    from verl.protocol import DataProto

    def read(worker: Any) -> Any:
        import time

        taken = torch.tensor([time.process_time()], dtype=torch.float64)
        return DataProto(batch=TensorDict({"seconds": taken}, batch_size=1))

    return float(workers.execute_with_func_generator(read).batch["seconds"].sum())
