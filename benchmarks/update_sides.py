"""An update of real workers, with the pass before it: as stock verl makes it, and as padded
trainers do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from benchmarks.one_gpu.rows import SAID, job_of, micro_batch_of, trained_rows
from benchmarks.one_gpu.rows import Row as RowFields
from verl_padding.plan import BatchPlan, Packer, Rows, Sharing, plan_batch

RANKS = 2
EOS = 3
PAD_LENGTH = 2
"""Tokens of a pad of the plan's."""
Row = tuple[str, list[int], list[int]]
"""Key, and tokens of prompt and response."""


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    strategy: str | None = None
    """None for stock verl."""
    packer: Packer = "verl"
    sharing: Sharing = "off"
    skips_idle: bool = False
    """Whether the update leaves idle rows out."""
    old_log_probs: Literal["put", "pass", "update"] = "put"
    """Old log-probs are those that were put with the rows, a pass's before the update, or the
    update's own."""
    all_pairs: bool = False
    """Whether transformers' own attention computes all pairs of tokens of a micro-batch, as it does
    on a CPU."""
    has_terms: bool = True
    """Whether the loss has its KL and entropy terms."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of an update, and the sides that make it."""

    rows: list[Row]
    prompts: int
    sessions: int
    """Of a prompt."""
    mini_prompts: int
    """Prompts of a mini-batch."""
    sides: tuple[Side, ...]
    idle: Sequence[int] = ()
    """Numbers of the rows without an advantage."""

    @property
    def idle_share(self) -> float:
        """Tokens of idle rows, as a share of all."""
        return sum(tokens_of(self.rows[row]) for row in self.idle) / sum(map(tokens_of, self.rows))

    def put(self) -> KVBatchMeta:
        """The rows in TransferQueue, with all that an update reads."""
        texts = {key: (prompt, response) for key, prompt, response in self.rows}
        tags = [
            {
                "prompt_len": len(prompt),
                "response_len": len(response),
                "seq_len": len(prompt) + len(response),
            }
            for prompt, response in texts.values()
        ]
        rows = trained_rows(texts)
        for number in self.idle:
            rows[self.rows[number][0]]["advantages"] *= 0
        return put(rows, tags)

    def extra_info(self) -> dict[str, Any]:
        """What verl's trainer says to the workers."""
        mini_rows = self.mini_prompts * self.sessions
        return SAID | {
            "calculate_entropy": False,
            "dataloader_kwargs": {"shuffle": False},
            "global_batch_size": mini_rows,
            "mini_batch_size": mini_rows,
        }

    def update(self, workers: Any, side: Side, budget: int) -> dict[str, Any]:
        """Seconds of the update and its pass, pads, and gradient norms of its optimizer steps."""
        batch = self.put()
        if side.strategy is None:
            return self._as_stock_verl(workers, batch, side)
        return self._as_planned(workers, batch, side, budget)

    def _as_stock_verl(self, workers: Any, batch: KVBatchMeta, side: Side) -> dict[str, Any]:
        from verl.trainer.ppo.v1 import PPOTrainer

        info = self.extra_info()
        trainer = SimpleNamespace(
            actor_rollout_wg=workers,
            tokenizer=SimpleNamespace(eos_token_id=EOS),
            _get_required_batch_multiple=lambda dp_size: info["mini_batch_size"],
        )
        padded = PPOTrainer._balance_batch(trainer, batch, metrics={})
        padded.extra_info.update(info)
        complete_pads(padded)
        begun = time.perf_counter()
        if side.old_log_probs == "pass":
            log_prob_pass(workers, padded)
        output = workers.update_actor(padded)
        taken = time.perf_counter() - begun
        tq.kv_clear(keys=padded.keys, partition_id=padded.partition_id)
        pad_tokens = sum(tag["seq_len"] for tag in padded.tags if tag.get("is_padding", False))
        return self._figures(output, taken, len(padded) - len(batch), pad_tokens)

    def _as_planned(
        self, workers: Any, batch: KVBatchMeta, side: Side, budget: int
    ) -> dict[str, Any]:
        from benchmarks.one_step import padded_group
        from verl_padding.pads.padded_batch import PaddedBatch
        from verl_padding.pads.template import PadTemplate
        from verl_padding.pads.upsampling import strip

        plan = self._plan(batch, side, budget)
        padded = PaddedBatch(
            batch,
            plan,
            PadTemplate(eos_token_id=EOS, length=PAD_LENGTH),
            branches=True if side.sharing == "on" else None,
            own_old_log_probs="actor" if side.old_log_probs == "update" else None,
            skips_idle="actor" if side.skips_idle else None,
        )
        padded.put_pads()
        batch.extra_info.update(self.extra_info())
        group = padded_group(workers, padded)
        begun = time.perf_counter()
        if side.old_log_probs == "pass":
            log_prob_pass(group, batch)
        output = group.update_actor(batch)
        taken = time.perf_counter() - begun
        strip(padded.pads)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        pad_tokens = plan.layouts["actor"].n_pads * PAD_LENGTH
        figures = self._figures(output, taken, plan.n_pads, pad_tokens)
        return figures | {"sharing_factor": plan.figures["actor"].sharing_factor}

    def _plan(self, batch: KVBatchMeta, side: Side, budget: int) -> BatchPlan:
        from verl_padding.prefix_sharing.detection import PrefixDetection

        assert side.strategy is not None
        job = job_of(
            prompts=self.prompts,
            sessions=self.sessions,
            mini_prompts=self.mini_prompts,
            ranks=RANKS,
            budget=budget,
            has_pass=side.old_log_probs == "pass",
            skips_idle=side.skips_idle,
            strategy=side.strategy,
            packer=side.packer,
            sharing=side.sharing,
        )
        tokens_R = [tag["seq_len"] for tag in batch.tags]
        forest = PrefixDetection(batch, tokens_R).by_outputs if side.sharing == "on" else None
        return plan_batch(Rows.from_keys(batch.keys, tokens_R, forest=forest, idle=self.idle), job)

    def _figures(self, output: Any, taken: float, pads: int, pad_tokens: int) -> dict[str, Any]:
        norms = [float(norm) for norm in output["metrics"]["grad_norm"]]
        assert all(norm > 0 for norm in norms), (
            f"an optimizer step learns nothing: gradient norms {norms}"
        )
        wasted = pad_tokens / (pad_tokens + sum(map(tokens_of, self.rows)))
        counts = {"pads": pads, "wasted_tokens": wasted, "steps": len(norms), "grad_norm": norms}
        return {"update": taken} | counts


def put(rows: Mapping[str, RowFields], tags: list[dict[str, Any]]) -> KVBatchMeta:
    """Puts the fields of rows; gives the batch whose calls read them."""
    data = micro_batch_of([*rows.values()]).apply(
        lambda each: each.float() if each.is_floating_point() else each
    )
    return tq.kv_batch_put(keys=[*rows], partition_id="train", fields=data, tags=tags)


def tokens_of(row: Row) -> int:
    return len(row[1]) + len(row[2])


def complete_pads(padded: KVBatchMeta) -> None:
    """Gives verl's pads what its passes would have written for them: they are copies of a row of
    another length."""
    pads = [
        (key, tag)
        for key, tag in zip(padded.keys, padded.tags, strict=True)
        if tag.get("is_padding", False)
    ]
    if pads:
        keys, tags = map(list, zip(*pads, strict=True))
        data = tq.kv_batch_get(
            keys=keys, partition_id=padded.partition_id, select_fields=["prompts", "responses"]
        )
        texts = zip(
            *([row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses")),
            strict=True,
        )
        put(trained_rows(dict(zip(keys, texts, strict=True))), tags)


def log_prob_pass(workers: Any, batch: KVBatchMeta) -> None:
    """The actor's pass over the rows of an update, which takes its log-probs for those of the old
    policy."""
    from verl.workers.utils.padding import response_from_nested

    from verl_padding.pads.queue import put_columns, rows_like

    rows = rows_like(batch, batch.keys, batch.tags)
    rows.extra_info.update(calculate_entropy=True, compute_loss=False)
    workers.compute_log_prob(rows)
    found = tq.kv_batch_get(
        batch.keys, batch.partition_id, select_fields=["log_probs", "response_mask"]
    )
    put_columns(
        rows, {"old_log_probs": response_from_nested(found["log_probs"], found["response_mask"])}
    )
