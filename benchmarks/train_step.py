"""An update of real FSDP2 workers: stock verl against the plan, turn by turn.

    python -m benchmarks.train_step [--keep] [--json]

The rows of ``long_tailed.jsonl``: 24 prompts of 8 sessions, of 1 to 5 rows. Two ranks, a Qwen2 of two layers, verl's
own worker, engine and loss. Stock verl pads and balances with its trainer's own ``_balance_batch``. The time of
``update_actor`` is reported, with that of planning and of pads beside it, the most memory that a worker held while it
ran, and the tokens that were wasted: those of pads, and what fills rows up to the longest of their micro-batch. The
sides take turns, in one order and the other, each from the model's weights, on the same rows, put anew. The gradient
norm of each optimizer step is kept: a step without a gradient ends the benchmark.

- At verl's number of optimizer steps: ``padding=lcm``, micro-batches by verl's packer and by the plan.
- At the configured number, prompts / ppo_mini_batch_size: ``padding=prompt``.
- What packing is compared with elsewhere: one row a micro-batch, and a fixed number of rows, padded to the longest of
  them (``use_dynamic_bsz=False``, ``use_remove_padding=False``), both by stock verl.
"""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import transfer_queue as tq
import typer
from rich.progress import track
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from benchmarks.attention import use_transformers_attention
from benchmarks.results import AsJson, Keep, busy_cores, console, report, show, spread
from tests.support.cluster import ray_and_queue
from verl_padding.plan import Packer, Sharing
from verl_padding.plan.cost import CostModel
from verl_padding.plan.row_keys import row_key

ROWS = Path(__file__).parent / "long_tailed.jsonl"
PROMPTS, SESSIONS, MINI_PROMPTS, RANKS = 24, 8, 8, 2
BUDGET = 2048
HIDDEN = 256
EOS = 3
PAD_LENGTH = 2
"""Tokens of a pad of the plan's."""


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    strategy: str | None
    """None for stock verl."""
    packer: Packer = "verl"
    sharing: Sharing = "off"
    micro_batch_rows: int | None = None
    """Rows of a micro-batch; None for as many as the token budget allows."""
    packs: bool = True
    """Whether the engine packs the rows of a micro-batch, or pads them to the longest."""
    skips_idle: bool = False
    """Whether the update leaves idle rows out."""
    old_log_probs: Literal["put", "pass", "update"] = "put"
    """Old log-probs are those that were put with the rows, a pass's before the update, or the update's own."""


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Prompts of a batch and of a mini-batch, sessions of a prompt, and the token budget of a micro-batch."""

    prompts: int = PROMPTS
    sessions: int = SESSIONS
    mini_prompts: int = MINI_PROMPTS
    budget: int = BUDGET

    @property
    def mini_rows(self) -> int:
        """What verl takes for the rows of a mini-batch."""
        return self.mini_prompts * self.sessions

    def extra_info(self) -> dict[str, Any]:
        """What verl's trainer says to the workers."""
        return {
            "temperature": 1.0,
            "calculate_entropy": False,
            "distillation_use_topk": False,
            "distillation_only": False,
            "seed": 1,
            "epochs": 1,
            "dataloader_kwargs": {"shuffle": False},
            "global_batch_size": self.mini_rows,
            "mini_batch_size": self.mini_rows,
        }


SIDES = (
    Side(name="stock verl", strategy=None),
    Side(name="lcm, verl's packer", strategy="lcm"),
    Side(name="lcm, plan's", strategy="lcm", packer="plan"),
    Side(name="prompt, plan's", strategy="prompt", packer="plan"),
    Side(name="stock verl, one row a micro-batch", strategy=None, micro_batch_rows=1),
    Side(name="stock verl, 4 padded rows a micro-batch", strategy=None, micro_batch_rows=4, packs=False),
)

SIZE = StepSize()


def put_batch(prompts: int = PROMPTS) -> KVBatchMeta:
    """The rows of the first prompts of the file, as :func:`put_lengths` puts them."""
    rows = [json.loads(line) for line in ROWS.read_text().split("\n") if line]
    first = list(dict.fromkeys(row["prompt"] for row in rows))[:prompts]
    rows = [row for row in rows if row["prompt"] in first]
    lengths = [(row["prompt_tokens"], row["response_tokens"]) for row in rows]
    seen: dict[tuple[str, int], int] = {}
    keys = []
    for row in rows:
        session = row["prompt"], row["session"]
        seen[session] = seen.get(session, -1) + 1
        keys.append(row_key(row["prompt"], row["session"], seen[session]))
    return put_lengths(lengths, keys)


def put_lengths(lengths: Sequence[tuple[int, int]], keys: list[str]) -> KVBatchMeta:
    """Rows of so many tokens, prompt and response, with all that an actor update reads; the same each time."""
    from tests.support.rows_in_queue import put_rows

    torch.manual_seed(0)
    batch = put_rows(lengths, keys)
    return put_trained(batch.keys, [response for _, response in lengths], batch.tags)


def put_trained(keys: Sequence[str], responses: Sequence[int], tags: Sequence[dict[str, Any]]) -> KVBatchMeta:
    """Puts what an update reads beside the rows themselves, for responses of so many tokens; the same each time.

    Advantages have both signs: if all were negative, clipping would leave no gradient once the first step has made the
    responses less likely.
    """
    from tests.support.rows_in_queue import PARTITION

    generator = torch.Generator().manual_seed(0)

    def column(mean: float, deviation: float) -> torch.Tensor:
        rows = [mean + deviation * torch.randn(tokens, generator=generator) for tokens in responses]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    log_probs = {name: column(-5.5, 0.1) for name in ("old_log_probs", "ref_log_prob")}
    return tq.kv_batch_put(
        keys=list(keys),
        partition_id=PARTITION,
        fields=TensorDict(log_probs | {"advantages": column(0.0, 1.0)}, batch_size=len(keys)),
        tags=list(tags),
    )


def make_model(folder: Path, hidden: int = HIDDEN, context: int = BUDGET) -> Path:
    """A Qwen2 of two layers of random weights, for rows of at most so many tokens."""
    import transformers

    from verl_padding.local.tiny_models import make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start_side(workers: Any, side: Side, *, terms: bool = True) -> None:
    """Gives the workers the model's weights and a new optimizer, and has them cut micro-batches as a side does.

    ``terms`` says whether the loss has its KL and entropy terms.
    """
    from verl.protocol import DataProto

    from tests.support.fsdp2_workers import start_over

    def pack(worker: Any) -> Any:
        # verl's TrainingWorker.train_batch takes this one from the model.
        object.__setattr__(worker.actor.model_config, "use_remove_padding", side.packs)
        return DataProto()

    start_over([workers], "token-mean", side.micro_batch_rows, terms=terms)
    workers.execute_with_func_generator(pack)


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


def computed_tokens(tokens_R: Sequence[int], side: Side, mini_rows: int) -> int:
    """Tokens that the ranks compute for the rows of an update by stock verl.

    Args:
        tokens_R: of the rows, pads among them, as they are dealt out: equal parts for the ranks, each cut in order.
        mini_rows: rows of a mini-batch, of all ranks.
    """
    if side.packs:
        return sum(tokens_R)
    assert side.micro_batch_rows is not None, "verl's packer cuts micro-batches by a token budget"
    of_rank, of_cell = len(tokens_R) // RANKS, mini_rows // RANKS
    cells = [
        tokens_R[start : start + of_cell]
        for rank in range(RANKS)
        for start in range(rank * of_rank, (rank + 1) * of_rank, of_cell)
    ]
    blocks = [
        cell[at : at + side.micro_batch_rows] for cell in cells for at in range(0, of_cell, side.micro_batch_rows)
    ]
    return sum(len(block) * max(block) for block in blocks)


def stock_update(workers: Any, batch: KVBatchMeta, size: StepSize, side: Side = SIDES[0]) -> dict[str, Any]:
    """Seconds, pads, steps and wasted tokens of an update, with its pass, as verl's trainer does it."""
    from verl.trainer.ppo.v1 import PPOTrainer

    trainer = SimpleNamespace(
        actor_rollout_wg=workers,
        tokenizer=SimpleNamespace(eos_token_id=EOS),
        _get_required_batch_multiple=lambda dp_size: size.mini_rows,
    )
    n_rows, real_tokens = len(batch), sum(tag["seq_len"] for tag in batch.tags)
    started = time.perf_counter()
    padded = PPOTrainer._balance_batch(trainer, batch, metrics={})
    ready = time.perf_counter()
    padded.extra_info.update(size.extra_info())
    _complete_stock_pads(padded)
    begun = time.perf_counter()
    if side.old_log_probs == "pass":
        _log_prob_pass(workers, padded)
    output = workers.update_actor(padded)
    done = time.perf_counter()
    tq.kv_clear(keys=padded.keys, partition_id=padded.partition_id)
    computed = computed_tokens([tag["seq_len"] for tag in padded.tags], side, size.mini_rows)
    return {
        "before": ready - started,
        "update": done - begun,
        "pads": len(padded) - n_rows,
        "wasted_tokens": 1 - real_tokens / computed,
        **steps_of(output),
    }


def _complete_stock_pads(padded: KVBatchMeta) -> None:
    """Gives verl's pads what its passes would have written for them: they are copies of a row of another length."""
    pads = [key for key, tag in zip(padded.keys, padded.tags, strict=True) if tag.get("is_padding", False)]
    if pads:
        rows = tq.kv_batch_get(keys=pads, partition_id=padded.partition_id, select_fields=["responses"])
        tags = [tag for tag in padded.tags if tag.get("is_padding", False)]
        put_trained(pads, [len(row) for row in rows["responses"].unbind()], tags)


def _log_prob_pass(workers: Any, batch: KVBatchMeta) -> None:
    """The actor's pass over the rows of an update, which takes its log-probs for those of the old policy."""
    from verl.workers.utils.padding import response_from_nested

    from verl_padding.pads.queue import put_columns, rows_like

    rows = rows_like(batch, batch.keys, batch.tags)
    rows.extra_info.update(calculate_entropy=True, compute_loss=False)
    workers.compute_log_prob(rows)
    found = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["log_probs", "response_mask"])
    put_columns(rows, {"old_log_probs": response_from_nested(found["log_probs"], found["response_mask"])})


def planned_update(
    workers: Any,
    batch: KVBatchMeta,
    side: Side,
    size: StepSize,
    cost_model: CostModel | None = None,
    *,
    timed: bool = False,
    idle: Sequence[int] = (),
) -> dict[str, Any]:
    """Seconds, pads, steps and wasted tokens (of packed rows) of an update, with its pass, as padded trainers do it.

    Args:
        cost_model: what the plan reckons with; None for verl's formula.
        timed: whether the workers, which have a clock then, time its micro-batches.
        idle: numbers of rows that a side which skips them leaves out.
    """
    from tests.support.padded_rows import upsample
    from verl_padding.driver.worker_calls import PaddedWorkerGroup
    from verl_padding.pads.lineage import find_extensions, find_forest
    from verl_padding.pads.template import PadTemplate
    from verl_padding.pads.upsampling import strip
    from verl_padding.plan import Job, Pass, Rows, Update, plan_batch

    assert side.strategy is not None
    shape: dict[str, Any] = {"dp_size": RANKS, "cost_model": cost_model}
    by_rows = side.micro_batch_rows is not None
    shape |= {"micro_batch_rows": side.micro_batch_rows} if by_rows else {"token_budget": size.budget}
    update = Update(**shape, prompts_per_mini_batch=size.mini_prompts, skips_idle=side.skips_idle)
    job = Job(
        strategy=side.strategy,
        prompts=size.prompts,
        sessions_per_prompt=size.sessions,
        updates={"actor": update},
        inference={"log_prob": Pass(**shape, as_update="actor")} if side.old_log_probs == "pass" else {},
        packer=side.packer,
        sharing=side.sharing,
    )
    started = time.perf_counter()
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    extends_R = find_extensions(batch, tokens_R) if side.sharing == "chains" else None
    forest = find_forest(batch, tokens_R) if side.sharing == "trees" else None
    plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, extends_R, forest, idle), job)
    own = "actor" if side.old_log_probs == "update" else None
    template = PadTemplate(eos_token_id=EOS, length=PAD_LENGTH)
    padded = upsample(batch, plan, template, timed=timed, own_old_log_probs=own)
    ready = time.perf_counter()
    batch.extra_info.update(size.extra_info())
    group = PaddedWorkerGroup(workers, lambda: padded)
    if side.old_log_probs == "pass":
        _log_prob_pass(group, batch)
    output = group.update_actor(batch)
    done = time.perf_counter()
    strip(padded.pads)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    pad_tokens = plan.layouts["actor"].n_pads * PAD_LENGTH
    return {
        "before": ready - started,
        "update": done - ready,
        "pads": plan.n_pads,
        "wasted_tokens": pad_tokens / (sum(tokens_R) + pad_tokens),
        **steps_of(output),
        "micro_batches": float(plan.figures["actor"].micro_batches or 0),
        "sharing_factor": plan.figures["actor"].sharing_factor,
    }


def steps_of(output: Any) -> dict[str, Any]:
    """How many optimizer steps an update took, and the norm of each one's gradient."""
    norms = [float(norm) for norm in output["metrics"]["grad_norm"]]
    assert all(norm > 0 for norm in norms), f"an optimizer step learns nothing: gradient norms {norms}"
    return {"steps": len(norms), "grad_norm": norms}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all sides.")] = 5,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures all sides, after a round to warm up."""
    busy = busy_cores()
    record: dict[str, list[dict[str, Any]]] = {side.name: [] for side in SIDES}
    with ray_and_queue(object_store_bytes=2_000_000_000), tempfile.TemporaryDirectory() as folder:
        from tests.support.fsdp2_workers import start_actor, stop
        from verl_padding.worker.losses import wrap_worker_loss
        from verl_padding.worker.plan_packer import install

        workers = start_actor(
            make_model(Path(folder)), RANKS, f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}"
        )
        # Both let rows that no plan has touched pass: stock verl's side runs verl's own loss and packer.
        workers.execute_with_func_generator(use_transformers_attention)
        workers.execute_with_func_generator(wrap_worker_loss("rows"))
        workers.execute_with_func_generator(install())
        for number in track(range(repeats + 1), "rounds", console=console):
            for side in SIDES if number % 2 else SIDES[::-1]:
                batch = put_batch()
                start_side(workers, side)
                start_peak(workers)
                took = (
                    stock_update(workers, batch, SIZE, side)
                    if side.strategy is None
                    else planned_update(workers, batch, side, SIZE)
                )
                took["peak_bytes"] = peak_of(workers)
                record[side.name].append(took)
        stop(workers)
    record = {name: took[1:] for name, took in record.items()}
    stock = [took["update"] for took in record[SIDES[0].name]]
    show(
        "seconds of an update, median (least-most); ratios round by round",
        ["side", "steps", "pads", "wasted tokens", "peak MiB", "plan and pads", "update", "stock verl / side"],
        [
            [
                name,
                took[0]["steps"],
                took[0]["pads"],
                f"{took[0]['wasted_tokens']:.1%}",
                round(median(it["peak_bytes"] for it in took) / 2**20),
                spread([it["before"] for it in took]),
                spread([it["update"] for it in took], 2),
                spread([theirs / it["update"] for theirs, it in zip(stock, took, strict=True)]),
            ]
            for name, took in record.items()
        ],
    )
    report({"sides": record}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
