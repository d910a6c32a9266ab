"""The same rows in the real TransferQueue with stock verl's pads and with ours, for benchmarks.zero_effect.

Stock verl's pads, order and advantages come from verl's own methods, ours from the padded trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

PROMPTS, SESSIONS, MICRO, RANKS = 30, 4, 6, 2
NOMINAL = PROMPTS * SESSIONS
HALF, ALL_BUT_ONE = 61, NOMINAL - 1
COMPUTED = ("old_log_probs", "ref_log_prob", "values")
READ = (
    *COMPUTED,
    "rollout_log_probs",
    "prompts",
    "responses",
    "response_mask",
    "loss_mask",
    "advantages",
    "returns",
    "teacher_logprobs",
)
SIDES = ("stock verl", "verl_padding")


@dataclass
class Side:
    """One way of padding, and the same rows in the same micro-batches without pads."""

    name: str
    trainer: Any
    wraps_loss: bool
    keys: list[str] = field(default_factory=list)
    """Rows in the order in which ranks and micro-batches get them."""
    pads: list[bool] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def micro_batches(self, *, with_pads: bool, at_once: bool = False) -> list[list[int]]:
        """Row numbers of each micro-batch, rank after rank; without pads all in one if that is asked for."""
        if at_once:
            return [[row for row, pad in enumerate(self.pads) if not pad]]
        cut = [[*range(len(self.keys))][start : start + MICRO] for start in range(0, len(self.keys), MICRO)]
        if with_pads:
            return cut
        return [rows for micro in cut if (rows := [row for row in micro if not self.pads[row]])]


def put_rows_without_pads(n_rows: int) -> Any:
    """Rows as they are before an advantage is computed, of 30 prompts with two to four sessions each."""
    from tests.support.rows_in_queue import put_rows

    draw = torch.Generator().manual_seed(0)
    keys = [f"p{row % PROMPTS}_{row // PROMPTS}_0" for row in range(n_rows)]
    lengths = [(int(torch.randint(2, 9, (), generator=draw)), 1 + row * 7 % 13) for row in range(n_rows)]
    teacher = [torch.randn(sum(length), 1, generator=draw).double() - 2 for length in lengths]
    torch.manual_seed(0)  # put_rows draws the rest, and both sides must get the same
    batch = put_rows(lengths, keys, teacher_logprobs=teacher)
    put_computed(batch.keys, [response for _, response in lengths], draw)
    return batch


def put_computed(keys: list[str], responses: list[int], draw: torch.Generator) -> None:
    """Puts what the workers compute of rows before an advantage."""
    import transfer_queue as tq
    from tensordict import TensorDict

    from tests.support.rows_in_queue import PARTITION

    columns = {
        name: torch.nested.as_nested_tensor(
            [torch.randn(length, generator=draw).double() * 0.3 - 1.0 for length in responses],
            layout=torch.jagged,
        )
        for name in COMPUTED
    }
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict(columns, batch_size=len(keys)))


def make_trainer(estimator: str) -> Any:
    """A padded trainer without workers; verl's own methods are its base's."""
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    from tests.support.trainer_without_workers import padded_trainer
    from verl_padding.job.calls import ACTOR, CRITIC, LOG_PROB, REF, VALUES

    trainer = padded_trainer(
        "padding.denominator=rows",
        f"algorithm.adv_estimator={estimator}",
        "critic.use_dynamic_bsz=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.rollout_is=token",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={MICRO}",
        *([f"critic.ppo_mini_batch_size={PROMPTS}"] if estimator == "gae" else []),
    )
    trainer._dp_sizes = lambda: dict.fromkeys((ACTOR, CRITIC, LOG_PROB, REF, VALUES), RANKS)
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=1000)
    return trainer


def pad_as_verl(estimator: str, n_rows: int) -> Side:
    """Stock verl's pads and order, advantages of its padded batch.

    Raises:
        Exception: whatever verl's estimator raises on it.
    """
    from verl.trainer.ppo.v1 import get_trainer_cls

    stock, side = get_trainer_cls("sync"), Side("stock verl", make_trainer(estimator), wraps_loss=False)
    batch = stock._balance_batch(side.trainer, put_rows_without_pads(n_rows), {})
    side.keys, side.pads = list(batch.keys), [bool(tag.get("is_padding")) for tag in batch.tags]
    pad_keys = [key for key, pad in zip(side.keys, side.pads, strict=True) if pad]
    assert len(pad_keys) == NOMINAL - n_rows
    put_computed(pad_keys, [1] * len(pad_keys), torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    stock._compute_advantage(side.trainer, batch, side.metrics)
    return side


def pad_as_we_do(estimator: str, n_rows: int) -> Side:
    """Our pads and plan, advantages of verl's method in the padded trainer."""
    side = Side("verl_padding", make_trainer(estimator), wraps_loss=True)
    batch = side.trainer._balance_batch(put_rows_without_pads(n_rows), {})
    torch.manual_seed(0)
    batch = side.trainer._compute_advantage(batch, side.metrics)
    rows = side.trainer._padded_batch.update_call("actor", batch)
    side.keys, side.pads = list(rows.keys), [bool(tag.get("is_padding")) for tag in rows.tags]
    assert 0 < sum(side.pads) < len(side.pads) == sum(side.pads) + n_rows
    return side


def read(side: Side, *, columns: bool) -> Any:
    """The rows of a side as a worker gets them, and the columns of ours."""
    import transfer_queue as tq

    from tests.support.rows_in_queue import PARTITION
    from verl_padding.pads.columns import OWN_COLUMNS

    data = tq.kv_batch_get(keys=side.keys, partition_id=PARTITION)
    # Without rollout_is_weights: verl's policy gradient of a distillation cannot read them, pads or not.
    names = [*READ, *(OWN_COLUMNS if columns else ())]
    return data.select(*[name for name in names if name in data])


def clear_queue() -> None:
    import transfer_queue as tq

    from tests.support.rows_in_queue import PARTITION, queue_content

    tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
