"""An update of real workers, with the pass before it: as stock verl makes it, and as padded
trainers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
import transfer_queue as tq

from benchmarks.one_gpu.rows import SAID, job_of, micro_batch_of, trained_rows
from verl_padding.plan import Rows, Sharing, plan_batch

RANKS = 2
EOS = 3
Row = tuple[str, list[int], list[int]]
"""Key, and tokens of prompt and response."""


@dataclass(frozen=True, kw_only=True)
class Side:
    name: str
    is_stock: bool = False
    """Whether stock verl makes the update, not the plan."""
    sharing: Sharing = "off"
    drops_zero_advantage: bool = False
    """Whether the update drops zero-advantage rows."""
    old_log_probs: Literal["put", "pass", "update"] = "put"
    """Old log-probs are those that were put with the rows, a pass's before the update, or the
    update's own."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of an update of one optimizer step, and the sides that make it; stock verl needs as many
    as divide by the ranks, since its pads lack what passes write."""

    rows: list[Row]
    sides: tuple[Side, ...]
    idle: Sequence[int] = ()
    """Numbers of the rows without an advantage."""

    @property
    def idle_share(self):
        """Tokens of zero-advantage rows, as a share of all."""
        return sum(tokens_of(self.rows[row]) for row in self.idle) / sum(map(tokens_of, self.rows))

    def put(self):
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
        rows = trained_rows(texts, torch.float32)
        for number in self.idle:
            rows[self.rows[number][0]]["advantages"] *= 0
        fields = micro_batch_of([*rows.values()])
        return tq.kv_batch_put(keys=[*rows], partition_id="train", fields=fields, tags=tags)

    def update(self, workers, side, budget):
        """Makes the update and its pass: the gradient norm of its optimizer step, and the factor by
        which a plan shares."""
        batch = self.put()
        if side.is_stock:
            found = self._as_stock_verl(workers, batch, side)
        else:
            found = self._as_planned(workers, batch, side, budget)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        return found

    def _as_stock_verl(self, workers, batch, side):
        from verl.trainer.ppo.v1 import PPOTrainer

        trainer = SimpleNamespace(
            actor_rollout_wg=workers,
            tokenizer=SimpleNamespace(eos_token_id=EOS),
            _get_required_batch_multiple=lambda dp_size: dp_size,
        )
        balanced = PPOTrainer._balance_batch(trainer, batch, metrics={})
        assert len(balanced) == len(self.rows)
        return self._run(workers, balanced, side)

    def _as_planned(self, workers, batch, side, budget):
        from benchmarks.one_step import padded_group
        from verl_padding.pads.padded_batch import PaddedBatch
        from verl_padding.pads.template import PadTemplate
        from verl_padding.pads.upsampling import strip

        plan = self._plan(workers, batch, side, budget)
        padded = PaddedBatch(
            batch,
            plan,
            PadTemplate(eos_token_id=EOS, length=2),
            may_branch=True if side.sharing == "on" else None,
            own_old_log_probs=side.old_log_probs == "update",
            drops_zero_advantage=side.drops_zero_advantage,
        )
        padded.put_pads()
        found = self._run(padded_group(workers, padded), batch, side)
        strip(padded.pads)
        return found | {"sharing_factor": plan.figures["actor"].sharing_factor}

    def _plan(self, workers, batch, side, budget):
        from verl_padding.driver.worker_calls import dp_size
        from verl_padding.prefix_sharing.detection import PrefixDetection

        job = job_of(
            prompts=1,
            sessions=len(self.rows),
            mini_prompts=1,
            ranks=dp_size(workers, "actor"),
            budget=budget,
            has_pass=side.old_log_probs == "pass",
            drops_zero_advantage=side.drops_zero_advantage,
            packer="plan",
            sharing=side.sharing,
        )
        tokens_R = [tag["seq_len"] for tag in batch.tags]
        tries = PrefixDetection(batch, tokens_R).by_outputs if side.sharing == "on" else None
        return plan_batch(
            Rows.from_keys(batch.keys, tokens_R, tries=tries, zero_advantage=self.idle), job
        )

    def _run(self, workers, batch, side):
        batch.extra_info |= SAID | {
            "calculate_entropy": False,
            "dataloader_kwargs": {"shuffle": False},
            "global_batch_size": len(batch),
            "mini_batch_size": len(batch),
        }
        if side.old_log_probs == "pass":
            log_prob_pass(workers, batch)
        (norm,) = workers.update_actor(batch)["metrics"]["grad_norm"]
        assert norm > 0, f"an optimizer step learns nothing: gradient norm {norm}"
        return {"grad_norm": float(norm)}


def tokens_of(row):
    return len(row[1]) + len(row[2])


def log_prob_pass(workers, batch):
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
