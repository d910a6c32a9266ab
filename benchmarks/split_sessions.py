"""A session of ten rows beside sessions of one row, for benchmarks.zero_effect: its weight, and its credit.

The same sessions are put into the real TransferQueue twice: as they are, and with one of them in one piece, which is
what its credit should not differ from.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.relative_errors import Outcome

SPLIT, TOKENS = 10, 3
"""Rows of the session that is split, and response tokens of each row."""
REWARDS = {"p0_0": 1.0, "p0_1": 0.0, "p0_2": 0.25, "p0_3": 0.75, "p1_0": 0.5, "p1_1": -0.5, "p1_2": 1.0, "p1_3": 0.0}
"""Reward of each session; the first one is split."""


def error_of_credit(estimator: str) -> dict[str, Outcome] | str:
    """Error of the advantages of all tokens, on each side, against those of sessions in one piece.

    The name of the exception if verl's trainer does not run the estimator at all.
    """
    from verl.trainer.ppo.v1 import get_trainer_cls

    from benchmarks.two_paddings import SIDES, clear_queue

    stock = get_trainer_cls("sync")._compute_advantage
    try:
        want = _credit(estimator, 1, stock)
    except (AssertionError, TypeError) as error:  # of estimators that verl's v1 trainer cannot run
        return type(error).__name__
    finally:
        clear_queue()
    told: dict[str, Outcome] = {}
    for side, compute in zip(SIDES, (stock, None), strict=True):
        try:
            got = _credit(estimator, SPLIT, compute)
            told[side] = float((got - want).norm() / want.norm())
        finally:
            clear_queue()
    return told


def _credit(estimator: str, pieces: int, compute: Any) -> torch.Tensor:
    """Advantages of all tokens, session by session; by the padded trainer's own method if ``compute`` is None."""
    import transfer_queue as tq
    from tensordict import TensorDict

    from tests.support.losses_on_rows import nested
    from tests.support.rows_in_queue import PARTITION, put_rows
    from tests.support.trainer_without_workers import padded_trainer

    critic = ["critic.ppo_mini_batch_size=2"] if estimator == "gae" else []
    settings = (f"algorithm.adv_estimator={estimator}", "algorithm.gamma=0.95", "algorithm.lam=0.9")
    trainer = padded_trainer("padding.advantages=session", *settings, *critic)
    lengths = {f"{session}_0": TOKENS for session in REWARDS}
    first = next(iter(lengths))
    del lengths[first]
    of_piece = TOKENS * SPLIT // pieces
    lengths = {f"{first[:-1]}{piece}": of_piece for piece in range(pieces)} | lengths
    scores = [torch.zeros(length, dtype=torch.float64) for length in lengths.values()]
    for key, score in zip(lengths, scores, strict=True):
        score[-1] = REWARDS[key.rsplit("_", 1)[0]]
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths.values()), generator=draw, dtype=torch.float64)
    cut = nested(values.split(list(lengths.values())))
    # TransferQueue takes the dtype of a field from its first put.
    batch = put_rows([(2, length) for length in lengths.values()], list(lengths), rm_scores=scores)
    fields = {"values": cut, "old_log_probs": cut.clone()}
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(batch)))
    if compute is None:
        trainer._compute_advantage(batch, {})
    else:
        compute(trainer, batch, {})
    data = tq.kv_batch_get(keys=list(lengths), partition_id=PARTITION, select_fields=["advantages"])
    return torch.cat([row.double() for row in data["advantages"].unbind()])


def weight_of_the_split_session(mode: str) -> dict[str, float]:
    """Its part of the gradient over that of a session of one row, on each side.

    Both have as many tokens, and all tokens have the same loss.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from benchmarks.two_paddings import SIDES
    from tests.support.losses_on_rows import nested, policy_loss
    from verl_padding.pads.columns import WEIGHS_ROWS, loss_columns
    from verl_padding.pads.weighing import Weighing, loss_factors
    from verl_padding.plan import Layout
    from verl_padding.worker.losses import RealRowsLoss

    keys = [f"p0_0_{row}" for row in range(SPLIT)] + [f"{session}_0" for session in list(REWARDS)[1:]]
    layout = Layout(n_rows=len(keys), cells=((tuple(range(len(keys))),),))
    weighing = Weighing(call="actor", mode=mode, by_session=True)
    tokens_R = [TOKENS] * SPLIT + [TOKENS * SPLIT] * (len(REWARDS) - 1)
    factor_R = loss_factors(layout, keys, [1.0] * len(keys), tokens_R, weighing)
    told = {}
    for side, columns in zip(SIDES, ({}, loss_columns(layout, tokens_R, factor_R)), strict=True):
        leaves = [torch.full((2 + tokens,), -1.0, dtype=torch.float64, requires_grad=True) for tokens in tokens_R]
        ones = nested(torch.ones(tokens, dtype=torch.float64) for tokens in tokens_R)
        mask = nested(torch.ones(tokens, dtype=torch.int64) for tokens in tokens_R)
        data = TensorDict(
            {
                "prompts": nested(torch.ones(2, dtype=torch.int64) for _ in keys),
                "responses": mask,
                "response_mask": mask,
                "loss_mask": mask,
                "advantages": ones,
                "old_log_probs": -ones,
                **columns,
            },
            batch_size=len(keys),
        )
        sizes = {"dp_size": 1, "batch_num_tokens": sum(tokens_R), "global_batch_size": len(REWARDS)}
        tu.assign_non_tensor(data, **sizes, **{WEIGHS_ROWS: bool(columns)})
        loss: Any = policy_loss(mode, terms=False)
        if columns:
            loss = RealRowsLoss(loss, "rows")
        loss(model_output={"log_probs": nested(leaves)}, data=data, dp_group=None)[0].backward()
        parts = [float(leaf.grad.abs().sum()) for leaf in leaves if leaf.grad is not None]
        told[side] = sum(parts[:SPLIT]) / parts[SPLIT]
    return told
