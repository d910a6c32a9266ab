"""What a step leaves: its counts and metrics, no pad, and a snapshot without its rows."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import get_trainer_cls

from tests.driver.test_zero_advantage_rows import ONE_STEP
from tests.support.rows_in_queue import (
    PARTITION,
    put_columns,
    put_rows,
    queue_content,
    read_columns,
)
from tests.support.sessions_that_grow import put_grown_sessions
from tests.support.trainer_without_workers import padded_trainer
from tests.worker.test_cross_contamination import training_worker
from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.pads.prompt_order import ordered_uid
from verl_padding.pads.upsampling import strip

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def set_up(trainer):
    trainer.actor_rollout_wg = SimpleNamespace(
        execute_with_func_generator=lambda function: DataProto(), _dispatch_info={"actor": [0, 1]}
    )
    trainer._setup()
    trainer.steps.has_probed = True


def test_a_first_batch_without_a_row_is_refused_by_the_plan():
    trainer = padded_trainer(*SHARES, "padding.repeated_tokens=once")
    trainer.steps.has_probed = False
    batch = KVBatchMeta(keys=[], tags=[], partition_id=PARTITION)
    with pytest.raises(PaddingDataError, match=r"^step 7: no real row in the batch"):
        trainer._balance_batch(batch, {})
    assert not trainer.steps.has_probed, "models are probed with the first row"


def test_steps_without_a_trained_token_are_counted(monkeypatch):
    """Rows of four prompts, two a mini-batch; those of the first two have no trained token, then
    all have one."""
    keys = [f"{ordered_uid(7, place)}_{session}_0" for place in range(4) for session in range(2)]
    stock, trainer, counts = get_trainer_cls("sync"), padded_trainer(), []
    for zero_advantage_rows in (4, 4, 0):
        masks = [torch.full((2,), int(row >= zero_advantage_rows)) for row in range(len(keys))]
        batch = put_rows([(5, 2)] * len(keys), keys, response_mask=masks)
        monkeypatch.setattr(
            stock,
            "_step_once",
            lambda self, metrics, *args, batch=batch: self._balance_batch(batch, metrics),
        )
        metrics = {}
        trainer._step_once(metrics, {}, len(keys))
        assert metrics["padding/actor/optimizer_steps/total"] == 2, "the configured ones"
        counts.append(metrics["padding/actor/idle_steps/total"])
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
    assert counts == [1, 1, 0]


IDLE = ("padding.zero_advantage_rows=skip", *ONE_STEP)
SHARES = ("padding.packer=plan", "padding.sharing=on")
TIMING = {"step": 4.0, "gen": 1.0, "update_actor": 2.0, "old_log_prob": 0.5}


@pytest.mark.parametrize(
    ("overrides", "local_updates"),
    [((), 1), (("padding.strategy=lcm",), 2), (SHARES, 1), (IDLE, 2)],
)
def test_performance_counts_pads_and_accuracy_does_not(overrides, local_updates, monkeypatch):
    trainer, lengths = padded_trainer(*overrides), [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9)]
    trainer.prepare_step, trainer.parameter_sync_step = dict, local_updates
    pads = []

    def update(self, metrics, *_):
        keys = [f"{ordered_uid(7, place + len(pads))}_0_0" for place in range(len(lengths))]
        batch = self._balance_batch(put_rows(lengths, keys), metrics)
        # The second row is idle.
        ones = [torch.ones(response) * (row != 1) for row, (_, response) in enumerate(lengths)]
        put_columns(batch, advantages=ones, returns=ones)
        if overrides is IDLE:
            self.steps.current.worker_batch(ACTOR, batch)
        pads.append(metrics["padding/actor/pad_rows/total"])
        return batch

    monkeypatch.setattr(get_trainer_cls("sync"), "_step_once", update)
    metrics = {}
    batch = trainer.step(metrics, {})
    trainer._compute_metrics(batch, metrics, TIMING, global_steps=7, epoch=0)
    n_pads = sum(pads)
    assert n_pads > 0
    # A pad has one prompt token and one response token.
    tokens = 66 * local_updates + 2 * n_pads
    assert metrics["global_seqlen/mean"] * 2 * local_updates == tokens
    assert metrics["perf/total_num_tokens"] == tokens
    assert metrics["perf/throughput"] == tokens / (4.0 * 2)
    assert metrics["timing_per_token_ms/update_actor"] == 2000 / tokens
    assert metrics["timing_per_token_ms/gen"] == 1000 / (24 * local_updates + n_pads)
    assert metrics["response_length/mean"] == pytest.approx(24 / 5)
    assert metrics["response_length/min"] == 1
    assert metrics["num_turns/min"] == 2


@pytest.mark.parametrize(
    ("error", "half_way"),
    [
        (RuntimeError("died"), False),
        (KeyboardInterrupt("died"), False),
        (RuntimeError("died"), True),
    ],
    ids=["an error", "an interruption", "a put that fails half way"],
)
def test_a_step_that_raises_or_is_interrupted_leaves_no_pad_behind(error, half_way, monkeypatch):
    trainer = padded_trainer()
    batch = put_rows([(5, 3), (7, 2), (4, 9)])
    content, put, written = queue_content(), tq.kv_batch_put, []

    def put_and_fail(**kwargs):
        put(**kwargs)
        written.append(len(queue_content()) - len(content))
        raise error

    def failing_step(self, *args, **kwargs):
        if half_way:
            monkeypatch.setattr(tq, "kv_batch_put", put_and_fail)
        self._balance_batch(batch, metrics={})
        written.append(len(queue_content()) - len(content))
        raise error

    monkeypatch.setattr(get_trainer_cls("sync"), "_step_once", failing_step)
    with pytest.raises(type(error), match="died"):
        trainer._step_once({}, {}, 1)
    assert written[0] > 0, "no pad was ever written"
    assert queue_content() == content
    assert trainer.steps.current is None


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_snapshot_is_taken_without_the_rows_the_step_has_trained(mode, monkeypatch):
    trainer = padded_trainer()
    trainer._job.mode = mode
    trained, waiting = put_rows([(5, 3), (7, 2), (4, 9)]), put_rows([(6, 1)])
    content, seen = queue_content(), []
    stock = get_trainer_cls("sync")
    monkeypatch.setattr(
        stock, "_step_once", lambda self, *args: self._balance_batch(trained, metrics={})
    )
    monkeypatch.setattr(
        stock, "step", lambda self, metrics, timing_raw: self._step_once(metrics, timing_raw, 1)
    )
    monkeypatch.setattr(stock, "_save_checkpoint", lambda self: seen.append(set(queue_content())))
    for _ in range(2):
        trainer.step({}, {})
    trainer._save_checkpoint()
    assert queue_content() == content, "verl's metrics and its dump need the rows afterwards"
    assert seen == [set(waiting.keys) if mode != "sync" else set(content)]


def test_pads_that_stay_are_cleared_with_a_warning_at_the_next_start(monkeypatch, caplog):
    """With rows that were trained; those whose prompt still waits stay."""
    stock, trainer = get_trainer_cls("sync"), padded_trainer()
    monkeypatch.setattr(stock, "_setup", lambda self: None)
    waiting = put_rows([(5, 3), (7, 2)], ["a_0_0", "a_1_0"]).keys
    prompt = {"is_prompt": True, "status": "finished", "global_steps": 1}
    tq.kv_put(key="a", partition_id=PARTITION, tag=prompt)
    batch = put_rows([(5, 3), (7, 2), (4, 9)])

    def unreachable(**kwargs):
        raise ConnectionError("TransferQueue is gone")

    def step_and_lose_the_queue(self, *args):
        self._balance_batch(batch, metrics={})
        lost.setattr(tq, "kv_clear", unreachable)
        raise RuntimeError("a worker died")

    monkeypatch.setattr(stock, "_step_once", step_and_lose_the_queue)
    with pytest.MonkeyPatch.context() as lost, pytest.raises(ConnectionError) as raised:
        trainer._step_once({}, {}, 1)
    assert str(raised.value.__context__) == "a worker died"
    left = queue_content()
    assert any(tag.get("is_padding") for tag in left.values())
    with caplog.at_level(logging.WARNING):
        set_up(padded_trainer())
    assert set(queue_content()) == {"a", *waiting}
    assert f"cleared {len(left) - 3} keys" in caplog.text


def put_sessions(sessions):
    """Rows of these tokens, a prompt of each session; the last token is the response."""
    uids = [ordered_uid(7, place) for place in range(len(sessions))]
    rows = {
        f"{uid}_0_{row}": (tokens[:-1], tokens[-1:])
        for uid, session in zip(uids, sessions, strict=True)
        for row, tokens in enumerate(session)
    }
    return put_grown_sessions(rows)


def test_returns_of_a_session_count_a_token_that_two_rows_have_once():
    """[5 | 6] goes on as [5 | 6 7 8], whose 7 is not trained: a reward of 1 is one step from 6."""
    trainer = padded_trainer(
        "padding.advantages=session",
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=0.5",
        "algorithm.lam=1",
    )
    first, other = (ordered_uid(7, place) for place in range(2))
    rows = {
        f"{first}_0_0": ([5], [6]),
        f"{first}_0_1": ([5], [6, 7, 8]),
        f"{other}_0_0": ([5], [9]),
    }
    zeros = [torch.zeros(len(response)) for _, response in rows.values()]
    batch = put_grown_sessions(
        rows,
        response_mask=list(map(torch.tensor, ([1], [1, 0, 1], [1]))),
        rm_scores=list(map(torch.tensor, ([1.0], [0.0, 0.0, 1.0], [0.0]))),
        values=zeros,
        old_log_probs=zeros,
    )
    trainer._balance_batch(batch, {})
    trainer._compute_advantage(batch, {})
    found = zip(*read_columns(batch, "returns", "response_mask"), strict=True)
    trained = [returns[mask == 1].tolist() for returns, mask in found]
    assert trained == [[0.5], [0.5, 1.0], [0.0]]
    strip(trainer.steps.current.pads)


def test_tokens_that_are_not_those_of_the_plan_are_told_and_counted(caplog):
    trainer = padded_trainer(*ONE_RANK, dp_size=1)
    trainer._balance_batch(put_sessions([[[5, 6, 7], [5, 6, 7, 8, 9]], [[5, 6]]]), {})
    update = trainer.steps.current
    update.note_work(ACTOR, 5 + 2, 1)
    assert "reached" not in caplog.text
    update.note_work(ACTOR, 3 + 5 + 2, 1)
    assert re.search(r"10 tokens .* worker call 'actor', .* 7", caplog.text)
    metrics = update.final_metrics()
    assert metrics["padding/computed_tokens/total"] == 7 + 10
    assert metrics["padding/saved/shared_tokens/total"] == 3


ONE_RANK = ("trainer.n_gpus_per_node=1", "padding.packer=plan", "padding.sharing=on")


def test_what_is_saved_adds_up_over_epochs_local_updates_and_steps(monkeypatch, caplog):
    # Of a step's first local update 3 + 2 of 8 + 5 tokens are shared, of its second 3 of 7; each
    # in a pass and in two epochs.
    stock = get_trainer_cls("sync")
    updates = iter(
        [[[[5, 6, 7], [5, 6, 7, 8, 9]], [[5, 6], [5, 6, 4]]], [[[7, 8, 9], [7, 8, 9, 1]]]] * 2
    )
    trainer = padded_trainer(*ONE_RANK, dp_size=1)
    trainer.parameter_sync_step, trainer.prepare_step = 2, dict

    def step_once(self, metrics, *_):
        batch = put_sessions(next(updates))
        self._balance_batch(batch, metrics)
        update = self.steps.current
        for call, epochs in (("log_prob", 1), (ACTOR, 2)):
            assert update.plan.layouts[call].n_pads == 0
            update.note_work(call, epochs * update.plan.figures[call].computed_tokens, epochs)
        return batch

    monkeypatch.setattr(stock, "_step_once", step_once)
    monkeypatch.setattr(stock, "fit", lambda self, _: [self.step(each, {}) for each in logged])
    logged = [{}, {}]
    trainer.fit(None)
    for metrics in logged:
        assert metrics["padding/computed_tokens/total"] == 3 * (5 + 3 + 4)
        assert metrics["padding/saved/shared_tokens/total"] == 3 * (3 + 2 + 3)
    assert "saved 48 of 120 tokens (40%): 48 shared" in caplog.messages[-1]


@pytest.mark.parametrize(("family", "n_tokens"), [("llama", 7 + 3), ("diffllama", 9 + 3)])
def test_rows_that_branch_share_as_the_model_has_shown_at_first(family, n_tokens):
    """diffllama's attention has masks of its own, which tries leave out. Of three tokens that two
    rows begin with before they branch, the last is computed in both."""
    worker = SimpleNamespace(actor=training_worker(family, torch.float32, shares=True))
    trainer = padded_trainer(*ONE_RANK, dp_size=1)
    trainer.actor_rollout_wg._worker_group.execute_with_func_generator = lambda ask: ask(worker)
    trainer.steps.has_probed = False
    metrics = {}
    trainer._balance_batch(
        put_sessions([[[5, 6, 7, 8], [5, 6, 7, 9, 9]], [[5, 6], [5, 6, 4]]]), metrics
    )
    assert metrics["padding/actor/computed_tokens/total"] == n_tokens
