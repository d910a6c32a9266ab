"""A whole step of stock verl and of a padded trainer on many rows, without a model: where its time goes.

    python -m benchmarks.scale [--rows 1000 --rows 10000 --rows 100000] [--keep] [--json]

Both sides run their trainer's own ``_step_once`` and ``_compute_metrics`` and clear the step's rows as ``fit`` does, on
rows in the real TransferQueue: sample, balance or plan, pads, log-probs, advantages, an update, pads out, metrics. The
workers are verl's own behind verl's own dispatch: eight ranks in the trainer's process, which read their rows, cut them
into mini-batches and answer with a number for each token, without a model. In a job they work at the same time: the
first reads all fields, and its seconds are told; the others read as little as an answer takes, off the clock. What an
engine does with the rows of a mini-batch is not in it; ``benchmarks.planning`` measures packing.

The sides take turns on the same rows, put anew. Long-tailed: 12.5 rows a prompt, in sessions of 1 to 5 rows where verl
expects 8 rows, with a lognormal number of tokens that is a hundredth of a usual one, so that 100,000 rows fit in
memory; the pads of stock verl, of 128 tokens otherwise, are as short as those of the plan. Each part is told without
the parts inside it, and the share of all parts that is spent in TransferQueue.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import psutil
import typer
from rich.progress import track

from benchmarks.results import AsJson, Keep, busy_cores, console, show, spread, tell
from tests.support.cluster import ray_and_queue
from verl_padding.plan.row_keys import row_key

SIZES = (1_000, 10_000)
"""Of a run that names none; with 100,000 rows, putting them takes minutes already."""
RANKS, MINI_BATCHES, SESSIONS = 8, 4, 8
ROWS_OF_PROMPT = 12.5
MOST_ROWS_OF_SESSION = 5
PROMPT_TOKENS = (4, 16)
RESPONSE_MEDIAN, RESPONSE_SIGMA, LONGEST = 15, 0.9, 160
BUDGET = 1024
EOS = 3
PAD_TOKENS = 2
STEP = 7
SIDES = ("stock verl", "verl_padding")

OTHER_RANKS = "other ranks"
"""Part that is not told: in a job they work while the first one does."""
OURS = ("order and metrics", "plan", "look rows up", "pads", "columns of calls", "session metrics", "strip")
"""Parts that padding brings; stock verl has pads too."""


class Clock:
    """Seconds of each part of a step, without those of the parts inside it.

    Args:
        processes: whose CPU time is counted beside that of this process: TransferQueue's.
    """

    def __init__(self, processes: Sequence[psutil.Process] = ()) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        """Of all processes and threads: what other work on the machine does not change."""
        self.queue_seconds: dict[str, float] = defaultdict(float)
        """Of the seconds of each part, those that it waited for TransferQueue."""
        self._processes = processes
        self._running: list[str] = []
        self._since = self._now()

    @contextmanager
    def over(self, part: str) -> Iterator[None]:
        """Counts a with-block as ``part``, and not as the part that it is in."""
        self._count()
        self._running.append(part)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    @contextmanager
    def in_queue(self) -> Iterator[None]:
        """Counts a with-block as TransferQueue's share of the part that it is in."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._running:
                self.queue_seconds[self._running[-1]] += time.perf_counter() - started

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of it counted as ``part``."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.over(part):
                return function(*args, **kwargs)

        return call

    def told(self) -> dict[str, dict[str, float]]:
        """Name of a kind of seconds -> part -> seconds, without those of the other ranks."""
        kinds = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "queue_seconds": self.queue_seconds}
        return {
            kind: {part: value for part, value in parts.items() if part != OTHER_RANKS} for kind, parts in kinds.items()
        }

    def _count(self) -> None:
        since, self._since = self._since, self._now()
        if self._running:
            self.seconds[self._running[-1]] += self._since[0] - since[0]
            self.cpu_seconds[self._running[-1]] += self._since[1] - since[1]

    def _now(self) -> tuple[float, float]:
        theirs = [process.cpu_times() for process in self._processes]
        return time.perf_counter(), time.process_time() + sum(times.user + times.system for times in theirs)


def processes_of_queue() -> list[psutil.Process]:
    """TransferQueue's controller and storage, which this process has started by Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # one of Ray's that has just ended
            command = " ".join(process.cmdline())
            if any(name in command for name in ("TransferQueueController", "SimpleStorageUnit")):
                found.append(process)
    assert found, "TransferQueue runs in none of this process's children"
    return found


def drawn_rows(n_rows: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Keys and (prompt, response) tokens of ``n_rows`` rows, the same each time."""
    from verl_padding.pads.prompt_order import ordered_uid

    rng = np.random.default_rng(0)
    keys: list[str] = []
    for place in range(n_prompts(n_rows)):
        uid = ordered_uid(STEP, place)
        share = round((place + 1) * n_rows / n_prompts(n_rows)) - len(keys)
        for session in range(SESSIONS):
            left, after = share, SESSIONS - 1 - session
            # As many rows as leave each later session at least one, and none more than it may have.
            least, most = max(1, left - after * MOST_ROWS_OF_SESSION), min(MOST_ROWS_OF_SESSION, left - after)
            rows = min(most, max(least, 1 + int(rng.poisson(0.6))))
            keys += [row_key(uid, session, index) for index in range(rows)]
            share -= rows
    responses = np.clip(rng.lognormal(np.log(RESPONSE_MEDIAN), RESPONSE_SIGMA, n_rows), 1, LONGEST).astype(int)
    prompts = rng.integers(*PROMPT_TOKENS, n_rows, endpoint=True)
    return keys, list(zip(prompts.tolist(), responses.tolist(), strict=True))


def n_prompts(n_rows: int) -> int:
    """Prompts of a batch of so many rows: a multiple of the mini-batches."""
    return max(1, round(n_rows / ROWS_OF_PROMPT / MINI_BATCHES)) * MINI_BATCHES


def job_overrides(n_rows: int) -> list[str]:
    """Of a job with so many rows a step; the same for both sides."""
    prompts = n_prompts(n_rows)
    return [
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // MINI_BATCHES}",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={BUDGET}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "algorithm.adv_estimator=grpo",
        f"trainer.n_gpus_per_node={RANKS}",
    ]


def make_trainer(side: str, n_rows: int) -> Any:
    """A trainer of a side, set up but for a model: its workers are ranks in this process."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    from tests.support.trainer_without_workers import padded_trainer
    from tests.support.verl_config import compose_job
    from verl_padding.driver.worker_calls import PaddedWorkerGroup

    ranks = make_ranks()
    overrides = job_overrides(n_rows)
    if side == "stock verl":
        trainer = get_trainer_cls("sync")(config=compose_job(*overrides))
        trainer.global_steps, trainer.local_trigger_step = STEP, 0
        trainer.tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=EOS)
        trainer.actor_rollout_wg = ranks
    else:
        trainer = padded_trainer("padding.packer=plan", *overrides, dp_size=RANKS)
        trainer.actor_rollout_wg = PaddedWorkerGroup(ranks, lambda: trainer._padded_batch)
    trainer.ranks = ranks
    trainer.distillation_config = None
    trainer.on_sample_end = lambda: None  # there are no replicas to put to sleep
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=())
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: RANKS)
    return trainer


def make_ranks() -> Any:
    """A worker group of ranks in this process; what the first one takes is a rank's share of a call."""
    import ray
    import torch
    from tensordict import TensorDict
    from transfer_queue import BatchMeta
    from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
    from verl.utils import tensordict_utils as tu

    from tests.support.ranks_in_process import MESH, Rank, RanksInProcess

    class RankWithoutModel(Rank):
        """Answers with a log-prob and an entropy for each token, and with the metrics that a trainer asks for."""

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
        def compute_log_prob(self, data: TensorDict) -> TensorDict:
            offsets = data["input_ids"].offsets()
            numbers = torch.full((int(offsets[-1]),), -1.0)
            column = torch.nested.nested_tensor_from_jagged
            answer = {"log_probs": column(numbers, offsets), "entropy": column(-numbers, offsets)}
            return TensorDict(answer, batch_size=len(data))

        def train_batch(self, data: TensorDict) -> TensorDict:
            metrics = {"mfu": [[0.0]], "rows": [[len(data)]]}
            return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})

    class RanksThatAnswer(RanksInProcess):
        def _execute_remote_single_worker(self, worker: Rank, method_name: str, *args: Any, **kwargs: Any) -> Any:
            reads_rows = method_name in ("compute_log_prob", "update_actor")  # verl asks each rank where it stands, too
            call = self.other_ranks if reads_rows and worker is not self.workers[0] else self.first_rank
            return call(worker, method_name, *args, **kwargs)

        def first_rank(self, *call: Any, **kwargs: Any) -> Any:
            return super()._execute_remote_single_worker(*call, **kwargs)

        def other_ranks(self, worker: Rank, method_name: str, share: Any) -> Any:
            rows: BatchMeta = ray.get(share)
            answer = getattr(worker, method_name)(rows.select_fields(["input_ids"]))
            if isinstance(answer, BatchMeta):  # verl joins the ranks' answers, which must name the same fields
                answer = BatchMeta(
                    rows.global_indexes,
                    rows.partition_ids,
                    field_schema=rows.field_schema | answer.field_schema,
                    production_status=answer.production_status,
                    extra_info=answer.extra_info,
                )
            return ray.put(answer)

    ranks = [RankWithoutModel(rank, RANKS, answers=True, numbers=lambda data: []) for rank in range(RANKS)]
    for rank in ranks:
        rank.engine.get_data_parallel_group = lambda: None  # that of the process
    group = RanksThatAnswer(ranks)
    group._dispatch_info[MESH] = list(range(RANKS))  # as verl has it after its first call
    return group


@contextmanager
def clocked(trainer: Any, clock: Clock) -> Iterator[None]:
    """Has the clock run over the parts of a trainer's step."""
    import verl.trainer.ppo.v1.trainer_base as trainer_base
    import verl.utils.transferqueue_utils as bridge
    from transfer_queue.client import TransferQueueClient
    from verl.trainer.ppo import padding_utils

    from verl_padding.driver import mixin
    from verl_padding.pads import queue
    from verl_padding.pads.padded_batch import PaddedBatch

    is_padded = isinstance(trainer, mixin.PaddedTrainer)
    parts: list[tuple[Any, str, str]] = [
        (trainer, "_balance_batch", "order and metrics" if is_padded else "balance"),
        (trainer, "_compute_old_log_prob", "log-probs"),
        (trainer, "_compute_advantage", "advantages"),
        (trainer, "_update_actor", "update"),
        (trainer, "_compute_metrics", "metrics"),
        (trainer.ranks, "compute_log_prob", "dispatch"),
        (trainer.ranks, "update_actor", "dispatch"),
        (trainer.ranks, "first_rank", "a rank"),
        (trainer.ranks, "other_ranks", OTHER_RANKS),
        (trainer_base, "upsample_batch_to_divisible_size", "pads"),
    ]
    if is_padded:
        parts += [
            (trainer, "_plan", "plan"),
            (trainer, "_padded", "look rows up"),
            (PaddedBatch, "put_pads", "pads"),
            (PaddedBatch, "inference_call", "columns of calls"),
            (PaddedBatch, "update_call", "columns of calls"),
            (PaddedBatch, "real_output", "columns of calls"),
            (mixin, "read_session_metrics", "session metrics"),
            (mixin, "strip", "strip"),
        ]
    with ExitStack() as undone:
        for owner, name, part in parts:
            undone.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        undone.enter_context(patch.object(padding_utils, "SYNTHETIC_PADDING_SEQ_LEN", PAD_TOKENS))
        for owner, name in (
            (TransferQueueClient, "_run_coroutine"),
            (bridge, "_run_async_in_temp_loop"),
            (queue.ray, "get"),  # by which rows are looked up in TransferQueue's controller
        ):
            undone.enter_context(patch.object(owner, name, _in_queue(clock, getattr(owner, name))))
        yield


def _in_queue(clock: Clock, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with clock.in_queue():
            return function(*args, **kwargs)

    return call


def step(trainer: Any, keys: Sequence[str], lengths: Sequence[tuple[int, int]]) -> tuple[Clock, int]:
    """The seconds of a step with new rows of these keys and lengths, and how many pads it had."""
    import transfer_queue as tq

    from tests.support.rows_in_queue import PARTITION, put_rows, queue_content

    batch = put_rows(lengths, keys)
    trainer.replay_buffer = SimpleNamespace(sample=lambda **_: (batch, {}))
    clock, metrics, timing_raw = Clock(processes_of_queue()), {}, {}
    with clocked(trainer, clock), clock.over("rest"):
        timing_raw["step"] = 1.0
        trained = trainer._step_once(metrics, timing_raw, len(keys))
        trainer._compute_metrics(trained, metrics, timing_raw, global_steps=STEP, epoch=0)
        with clock.over("rows out"):
            tq.kv_clear(keys=trained.keys, partition_id=PARTITION)
    assert not queue_content(), "a step leaves nothing in the queue"
    pads = metrics["padding/pad_rows/total"] if "padding/pad_rows/total" in metrics else len(trained) - len(keys)
    return clock, int(pads)


def main(
    rows: Annotated[list[int] | None, typer.Option(min=100, help="Rows of a step; several sizes by turns.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each side, after one to warm up.")] = 1,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures a step of each size."""
    busy = busy_cores()
    figures = []
    with ray_and_queue(object_store_bytes=1_000_000_000), group_of_one():
        for n_rows in rows or SIZES:
            figures.append(steps_of(n_rows, repeats))
            show_steps(figures[-1])
    tell({"steps": figures}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process: verl's worker gathers the lengths of a mini-batch's rows from all ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps_of(n_rows: int, repeats: int) -> dict[str, Any]:
    """Seconds of each part of a step, by side, turn by turn."""
    keys, lengths = drawn_rows(n_rows)
    trainers = {side: make_trainer(side, n_rows) for side in SIDES}
    for trainer in trainers.values():
        step(trainer, *drawn_rows(min(n_rows, 1000)))  # warm
    told: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in track(range(repeats), f"{n_rows:,} rows", console=console):
        for side, trainer in trainers.items():
            clock, pads = step(trainer, keys, lengths)
            told[side].append({"pads": pads, **clock.told()})
    return {"rows": n_rows, "tokens": sum(map(sum, lengths)), "sides": told}


def show_steps(figures: dict[str, Any]) -> None:
    """A table of the parts of a step."""
    stock, ours = (figures["sides"][side] for side in SIDES)
    parts = list(dict.fromkeys([*stock[0]["seconds"], *ours[0]["seconds"]]))
    parts = [part for part in parts if part not in OURS] + [part for part in OURS if part in parts]
    rows = [[part, *_cells(stock, ours, lambda it, part=part: it.get(part))] for part in parts]
    rows.append(["all", *_cells(stock, ours, lambda it: sum(it.values()))])
    waited = [[spread([sum(it["queue_seconds"].values()) for it in side], 2)] for side in (stock, ours)]
    show(
        f"{figures['rows']:,} rows, {stock[0]['pads']:,} and {ours[0]['pads']:,} pads: a step, median (least-most)",
        ["part", *[f"{side}, {what}" for what in ("s", "CPU s") for side in SIDES], "CPU, ours / stock"],
        [*rows, ["waited for TransferQueue", *[cell for cells in waited for cell in cells], "", "", ""]],
    )


def _cells(
    stock: list[dict[str, Any]], ours: list[dict[str, Any]], of: Callable[[dict[str, float]], float | None]
) -> list[Any]:
    told = {
        what: [[seconds for it in side if (seconds := of(it[what])) is not None] for side in (stock, ours)]
        for what in ("seconds", "cpu_seconds")
    }
    theirs, mine = told["cpu_seconds"]
    spreads = [spread(values, 2) if values else "" for sides in told.values() for values in sides]
    return [*spreads, median(mine) / median(theirs) if theirs and mine and median(theirs) else ""]


if __name__ == "__main__":
    typer.run(main)
