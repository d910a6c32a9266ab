"""verl's ``_compute_advantage`` on rows in the real TransferQueue, before a pad is made and while pads wait there."""

import dataclasses
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import AdaptiveKLController

from tests.support.rows_in_queue import PARTITION, put_columns, put_rows, queue_content
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.job.calls import ACTOR, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.pads.upsampling import strip
from verl_padding.plan.row_keys import session_of_key

LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (8, 4), (2, 5)]
KEYS = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_1_0", "b_1_1", "c_0_0", "c_1_0"]
COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
RESULTS = ("advantages", "returns", "token_level_rewards", "response_mask", "rollout_is_weights")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What verl's method left behind."""

    rows: dict[str, list[list[float]]]  # by field of the queue
    kl_coefficient: float  # of the adaptive controller
    metrics: dict[str, Any]
    error: tuple[type, str] | None  # what it ended with, if it raised


def put_scored_rows() -> KVBatchMeta:
    """Rows as the trainer has them before advantages: each ends with the reward of its session."""
    draw = torch.Generator().manual_seed(0)
    reward = {session: float(torch.randn((), generator=draw)) for session in dict.fromkeys(map(session_of_key, KEYS))}
    batch = put_rows(LENGTHS, KEYS)
    rows = [(n, session_of_key(key)) for (_, n), key in zip(LENGTHS, KEYS, strict=True)]
    scores = [torch.tensor([0.0] * (n - 1) + [reward[session]]) for n, session in rows]
    columns = {name: [torch.randn(n, generator=draw) for n, _ in rows] for name in COLUMNS}
    return put_columns(batch, rm_scores=scores, **columns)


def without_and_with_pads(estimator: str, *overrides: str, kl_in_reward: bool = True) -> tuple[Outcome, Outcome]:
    critic = ["critic.ppo_mini_batch_size=2"] if estimator == "gae" else []
    settings = (f"algorithm.adv_estimator={estimator}", f"algorithm.use_kl_in_reward={kl_in_reward}", *critic)
    trainer = padded_trainer(*settings, *overrides)
    trainer._dp_sizes = lambda: dict.fromkeys((ACTOR, CRITIC, LOG_PROB, REF, VALUES), 2)
    without = _computed(trainer, put_scored_rows())
    batch = trainer._balance_batch(put_scored_rows(), {})
    assert trainer._padded_batch.plan.n_pads > 0
    assert len(queue_content()) > len(LENGTHS)
    with_pads = _computed(trainer, batch)
    strip(trainer._padded_batch.pads)
    return without, with_pads


def _computed(trainer, batch: KVBatchMeta) -> Outcome:
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10)
    metrics: dict[str, Any] = {}
    error = None
    torch.manual_seed(0)
    try:
        trainer._compute_advantage(batch, metrics)
    except Exception as raised:  # whatever verl raises, the same must come with pads
        error = type(raised), str(raised)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    rows = {
        name: [row.tolist() for row in data[name].unbind()]
        for name in RESULTS
        if name in data.keys()  # noqa: SIM118  (a TensorDict)
    }
    return Outcome(rows, trainer.kl_ctrl_in_reward.value, metrics, error)
