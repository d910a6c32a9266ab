"""Updates of real FSDP2 workers on a CPU, as stock verl makes them and as padded trainers do: what each took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_padding.plan import Packer, Sharing
from verl_padding.plan.cost import CostModel

RANKS = 2
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
    attention: Literal["all pairs", "row by row"] = "all pairs"
    """Of a micro-batch: transformers' own computes all pairs of tokens on a CPU, that of ``+local=cpu`` does not."""
    has_terms: bool = True
    """Whether the loss has its KL and entropy terms."""


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Prompts of a batch and of a mini-batch, sessions of a prompt, and the token budget of a micro-batch."""

    prompts: int
    sessions: int
    mini_prompts: int
    budget: int

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


def update_of(workers: Any, batch: KVBatchMeta, side: Side, size: StepSize, idle: Sequence[int] = ()) -> dict[str, Any]:
    """Seconds, pads, steps and wasted tokens of a side's update, with its pass."""
    if side.strategy is None:
        return stock_update(workers, batch, side, size)
    return planned_update(workers, batch, side, size, idle=idle)


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


def stock_update(workers: Any, batch: KVBatchMeta, side: Side, size: StepSize) -> dict[str, Any]:
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
    padded = upsample(
        batch,
        plan,
        PadTemplate(eos_token_id=EOS, length=PAD_LENGTH),
        timed=timed,
        own_old_log_probs="actor" if side.old_log_probs == "update" else None,
        skips_idle="actor" if side.skips_idle else None,
    )
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
