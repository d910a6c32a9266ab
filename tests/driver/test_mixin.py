"""The padded trainer's own steps on the real TransferQueue; the workers here only say how many
ranks they have."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls

from benchmarks.one_step import padded_group
from tests.support.losses_on_rows import nested
from tests.support.rows_in_queue import PARTITION, put_rows, put_some_fields, queue_content
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.driver.step_planner import UpdateNumber
from verl_padding.driver.training_steps import TrainingSteps
from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.pads import source_rows
from verl_padding.pads.prompt_order import ordered_uid, place_of
from verl_padding.worker import plan_packer

PAD_TOKENS = 2
"""Of a pad of text."""

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def set_up(trainer):
    trainer.actor_rollout_wg = SimpleNamespace(
        execute_with_func_generator=lambda function: None, _dispatch_info={"actor": [0, 1]}
    )
    trainer._setup()
    trainer.steps.has_probed = True


@pytest.mark.parametrize("sharing", ["off", "on"])
def test_workers_are_told_to_share_prefixes_if_the_job_asks_for_it(sharing, monkeypatch):
    monkeypatch.setattr(get_trainer_cls("sync"), "_setup", lambda self: None)
    asked = []
    monkeypatch.setattr(plan_packer, "install", lambda *, shares: asked.append(shares))
    trainer = padded_trainer("padding.packer=plan", f"padding.sharing={sharing}")
    asked.clear()
    set_up(trainer)
    assert asked == [sharing == "on"]


def test_rows_of_a_session_that_part_share_if_the_models_allow_it():
    # Four sessions of two rows: the first 20 of 24 tokens of each are the same.
    starts = torch.randint(5, 200, (4, 20)).repeat_interleave(2, dim=0)
    rows = torch.cat([starts, torch.arange(8)[:, None].expand(8, 4)], dim=1)
    batch = put_rows(
        [(20, 4)] * 8,
        input_ids=list(rows),
        prompts=list(rows[:, :20]),
        responses=list(rows[:, 20:]),
    )
    factors = {}
    for branches in (False, True):
        trainer, metrics = padded_trainer("padding.packer=plan", "padding.sharing=on"), {}
        trainer._job.may_branch = branches
        trainer._balance_batch(batch, metrics)
        factors[branches] = metrics["padding/actor/sharing_factor"]
    # The last of the tokens that two rows share is computed in both.
    assert factors == pytest.approx({False: 1.0, True: 48 / (24 + 24 - 19)})


def refused(trainer, batch, message):
    content = queue_content()
    with pytest.raises(PaddingDataError, match=message):
        trainer._balance_batch(batch, metrics={})
    assert queue_content() == content, "a refusal leaves the queue as it was"
    assert trainer.steps.current is None


def test_prompts_are_fetched_under_uids_that_tell_their_order():
    trainer = padded_trainer()
    trainer.config.data.gen_batch_size = 2
    trainer.train_dataloader, trainer.train_dataloader_it = _Prompts(), None
    places = []
    for step, n_prompts in ((7, 4), (7, 2), (8, 4)):
        trainer.global_steps = step
        batch = trainer._next_train_batch(n_prompts)
        places += [place_of(uid) for uid in batch["uid"]]
        assert batch["index"].tolist() == [0, 1] * (n_prompts // 2)
        assert batch["global_steps"] == step
    assert places == [(7, place) for place in range(6)] + [(8, place) for place in range(4)]


class _Prompts:
    """A data loader of the same two prompts, for ever."""

    def __iter__(self):
        while True:
            yield {"raw_prompt": [[{"role": "user", "content": "?"}]] * 2, "index": torch.arange(2)}


def test_the_plan_does_not_depend_on_which_session_ended_first():
    uids = [ordered_uid(7, place) for place in range(4)]
    keys = [
        f"{uid}_{session}_{index}" for uid in uids for session in range(2) for index in range(2)
    ][:15]
    lengths = [(5 + number, 3 + number % 4) for number in range(len(keys))]
    plans, metrics = [], {}
    for order in (range(15), reversed(range(15)), np.random.default_rng(0).permutation(15)):
        came = [int(number) for number in order]
        batch = put_rows([lengths[number] for number in came], [keys[number] for number in came])
        trainer = padded_trainer()
        trainer._balance_batch(batch, metrics)
        assert batch.keys == keys
        assert [tag["seq_len"] for tag in batch.tags] == [
            prompt + response for prompt, response in lengths
        ]
        plans.append(trainer.steps.current.plan)
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
    assert plans[0].n_pads > 0
    assert plans[0] == plans[1] == plans[2]


def test_the_batch_keeps_its_rows_and_metrics_tell_of_the_plan():
    trainer, metrics = padded_trainer(), {}
    batch = put_rows([(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (4, 4)])
    keys = list(batch.keys)
    returned = trainer._balance_batch(batch, metrics)
    assert returned is batch
    assert batch.keys == keys
    assert metrics["padding/real_rows/total"] == 7
    assert metrics["padding/actor/optimizer_steps/total"] == 2
    assert metrics["padding/pad_rows/total"] == trainer.steps.current.plan.n_pads > 0
    layout, lengths = (
        trainer.steps.current.plan.layouts[ACTOR],
        [tag["seq_len"] for tag in batch.tags],
    )
    tokens_D = [
        sum(
            lengths[row] if row < 7 else PAD_TOKENS for cells in layout.cells for row in cells[rank]
        )
        for rank in (0, 1)
    ]
    assert layout.n_pads > 0
    assert sum(tokens_D) == sum(lengths) + PAD_TOKENS * layout.n_pads
    assert metrics["global_seqlen/mean"] == sum(tokens_D) / 2, "what a rank gets, as verl counts it"
    assert metrics["global_seqlen/balanced_min"] == min(tokens_D)
    assert metrics["global_seqlen/balanced_max"] == max(tokens_D)
    assert len(queue_content()) == 7 + trainer.steps.current.plan.n_pads


def test_steps_without_a_trained_token_are_counted_and_told_once(monkeypatch, caplog):
    """Rows of four prompts, two a mini-batch; those of the first two have no trained token, then
    all have one."""
    keys = [f"{ordered_uid(7, place)}_{session}_0" for place in range(4) for session in range(2)]
    stock, trainer, counts = get_trainer_cls("sync"), padded_trainer(), []
    for idle_rows in (4, 4, 0):
        masks = [torch.full((2,), int(row >= idle_rows)) for row in range(len(keys))]
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
    assert caplog.text.count("1 of 2 optimizer steps of 'actor'") == 1


@pytest.mark.parametrize("local_updates", [1, 2])
def test_verls_metrics_are_what_verl_computes_of_the_batch_with_its_pads(
    local_updates, monkeypatch
):
    stock, trainer, metrics = get_trainer_cls("sync"), padded_trainer(), {}
    timing_raw = {"step": 4.0, "gen": 1.0, "ref": 0.5, "adv": 0.25, "update_actor": 2.0}
    of_verl, pads = [], []

    def update(self, metrics, *args):
        lengths = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (4, 4)]
        batch = self._balance_batch(put_rows(lengths), metrics)
        advantages = nested(torch.randn(tag["response_len"]) for tag in batch.tags)
        columns = TensorDict(
            {"advantages": advantages, "returns": advantages.clone()}, batch_size=len(batch)
        )
        tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=columns, tags=batch.tags)
        self.steps.current.padded_for(ACTOR).update_call(
            ACTOR, batch
        )  # what gives pads the fields of real rows
        pads.extend(self.steps.current.pads)
        padded = KVBatchMeta(
            keys=[*batch.keys, *pads[-1].keys],
            tags=[*batch.tags, *pads[-1].tags],
            partition_id=PARTITION,
        )
        of_verl.append({})
        stock._compute_metrics(self, padded, of_verl[-1], timing_raw, global_steps=7, epoch=0)
        return batch

    monkeypatch.setattr(stock, "_step_once", update)
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    trainer._rollout_moe_lb_metrics_accumulator = None
    trainer.prepare_step, trainer.parameter_sync_step = dict, local_updates
    for _ in range(2):  # pads of the step before count no more
        of_verl.clear()
        pads.clear()
        trained = trainer.step(metrics, {})
        trainer._compute_metrics(trained, metrics, timing_raw, global_steps=7, epoch=0)
    assert min(map(len, pads)) > 0
    if local_updates == 1:
        assert {name: metrics[name] for name in of_verl[0]} == pytest.approx(of_verl[0], rel=1e-6)
    real = sum(tag["seq_len"] for tag in trained.tags)
    assert metrics["perf/total_num_tokens"] == sum(
        told["perf/total_num_tokens"] for told in of_verl
    )
    assert metrics["perf/total_num_tokens"] == real + PAD_TOKENS * sum(map(len, pads))
    assert metrics["perf/throughput"] == metrics["perf/total_num_tokens"] / (4.0 * 2)
    for name in set(timing_raw) - {"step"}:
        metric = f"timing_per_token_ms/{name}"
        assert 1 / metrics[metric] == pytest.approx(
            sum(1 / told[metric] for told in of_verl), rel=1e-6
        )


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
def test_a_snapshot_of_the_queue_is_taken_without_the_rows_that_the_step_has_trained(
    mode, monkeypatch
):
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


@pytest.mark.parametrize("gone", [2, 3, None], ids=["some rows gone", "all rows gone", "in a step"])
def test_a_checkpoint_holds_neither_pads_nor_trained_rows(gone, monkeypatch):
    trainer, waiting, seen = padded_trainer(), put_rows([(6, 1)]), []
    trained = put_rows([(5, 3), (7, 2), (4, 9)])
    if gone is None:
        trainer._balance_batch(trained, {})
        assert trainer.steps.current.plan.n_pads > 0
    else:
        trainer.steps._updates = [SimpleNamespace(batch=trained)]
        tq.kv_clear(keys=trained.keys[:gone], partition_id=PARTITION)
    trainer._job.mode = "colocate_async"
    monkeypatch.setattr(
        get_trainer_cls("sync"), "_save_checkpoint", lambda self: seen.append(set(queue_content()))
    )
    content = queue_content()
    trainer._save_checkpoint()
    assert queue_content() == content
    assert seen == [set(waiting.keys)]


def test_pads_that_could_not_be_taken_out_are_cleared_with_a_warning_at_the_next_start(
    monkeypatch, caplog
):
    stock = get_trainer_cls("sync")
    monkeypatch.setattr(stock, "_setup", lambda self: None)
    trainer = padded_trainer()
    set_up(trainer)
    batch = put_rows([(5, 3), (7, 2), (4, 9)])
    clear = tq.kv_clear

    def step_and_lose_the_queue(self, *args):
        self._balance_batch(batch, metrics={})
        monkeypatch.setattr(tq, "kv_clear", unreachable)
        raise RuntimeError("a worker died")

    def unreachable(**kwargs):
        raise ConnectionError("TransferQueue is gone")

    monkeypatch.setattr(stock, "_step_once", step_and_lose_the_queue)
    with pytest.raises(RuntimeError, match="a worker died"):
        trainer._step_once({}, {}, 1)
    monkeypatch.setattr(tq, "kv_clear", clear)
    left = queue_content()
    assert any(tag.get("is_padding") for tag in left.values())
    assert any("could not be cleared" in record.getMessage() for record in caplog.records)

    snapshot = []

    def load_snapshot(self):
        rows = put_rows([(5, 3), (7, 2)])
        prompt = rows.keys[0].split("_")[0]
        tq.kv_put(key=prompt, partition_id=PARTITION, tag={"is_prompt": True, "status": "finished"})
        snapshot.extend([prompt, *rows.keys])

    monkeypatch.setattr(stock, "_setup", load_snapshot)
    with caplog.at_level(logging.WARNING):
        set_up(padded_trainer())
    assert set(queue_content()) == set(snapshot)
    assert any(f"cleared {len(left)} keys" in record.getMessage() for record in caplog.records)
    tq.kv_clear(keys=snapshot, partition_id=PARTITION)


def test_a_batch_without_real_rows_is_refused():
    empty = KVBatchMeta(keys=[], tags=[], partition_id=PARTITION)
    refused(padded_trainer(), empty, r"^step 7: no real row in the batch")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            (60, 5),
            (
                r"^step 7: row '{}' has 65 tokens.* 64"
                r" .*actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
            ),
        ),
        ((0, 5), r"^row '{}': its prompt has no token\. verl takes the log-prob of the first"),
    ],
    ids=["over the token budget", "without a prompt"],
)
def test_a_row_that_cannot_be_planned_is_refused_by_key_and_setting(lengths, message):
    batch = put_rows([(5, 3), lengths])
    refused(padded_trainer(), batch, message.format(batch.keys[1]))


@pytest.mark.parametrize("dp_size", [1, 2], ids=["no pad is needed", "pads are needed"])
def test_rows_that_are_not_in_the_queue_are_refused_by_name(dp_size):
    batch = put_rows([(5, 3)] * 4)
    trainer = padded_trainer(f"trainer.n_gpus_per_node={dp_size}", dp_size=dp_size)
    lost = batch.keys[1:3]
    tq.kv_clear(keys=lost, partition_id=PARTITION)
    refused(
        trainer,
        batch,
        rf"^row '{lost[0]}': not in TransferQueue \(2 of 4 rows of the batch are not\)",
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"weight": torch.ones(3)}, {"weight": torch.ones(5).double(), "more": 1}],
            "'weight': .* has not listed it",
        ),
        (
            [{"micro_batch": torch.tensor(1.0)}] * 2,
            "'micro_batch': rows have it, as torch.float32, but",
        ),
        ([{}, {"micro_batch": "a word"}], "'micro_batch': rows have it, as no tensor, but"),
    ],
)
def test_fields_of_several_dtypes_and_the_plug_ins_own_names_are_refused(rows, message):
    refused(padded_trainer(), put_some_fields([(5, 3), (6, 5)], rows), f"^field {message}")


def test_a_field_without_a_role_is_refused_though_no_pad_is_needed(monkeypatch):
    trainer = padded_trainer("trainer.n_gpus_per_node=1", dp_size=1)
    batch = put_rows([(5, 3), (4, 2)] * 2)
    read, get = [], source_rows.read_rows
    monkeypatch.setattr(
        source_rows, "read_rows", lambda keys, partition: read.append(keys) or get(keys, partition)
    )
    for reads in (1, 0):
        read.clear()
        trainer._balance_batch(batch, {})
        assert trainer.steps.current.plan.n_pads == 0
        assert len(read) == reads, (
            "rows are read for fields that no step has met, and for no others"
        )
    content = queue_content()
    assert len(content) == 4
    tq.kv_batch_put(
        keys=batch.keys,
        partition_id=PARTITION,
        fields=TensorDict({"odd": nested([torch.ones(15), torch.ones(8)] * 2)}, batch_size=4),
    )
    with pytest.raises(PaddingDataError, match=r"^field 'odd': its role is unclear.* fit no role"):
        trainer._balance_batch(batch, {})
    assert queue_content() == content


@pytest.mark.parametrize(
    ("lengths", "steps"), [([(5, 3)], 1), ([(5, 3), (6, 2)], 1), ([(5, 3)] * 3, 2)]
)
def test_fewer_prompts_than_mini_batches_give_fewer_steps_and_a_warning(lengths, steps, caplog):
    trainer, metrics = padded_trainer(), {}
    with caplog.at_level(logging.WARNING):
        trainer._balance_batch(put_rows(lengths), metrics)
    assert metrics["padding/actor/optimizer_steps/total"] == steps
    assert metrics["padding/actor/mini_batch_real_rows/min"] >= 1
    assert any("actor: only 1 of 2 optimizer steps" in r.getMessage() for r in caplog.records) == (
        steps == 1
    )


@pytest.mark.parametrize(("eos", "pad", "token"), [(3, 4, 3), (None, 4, 4), (None, None, 0)])
def test_a_pad_is_made_of_the_end_of_a_text_or_of_whatever_token_there_is(eos, pad, token):
    trainer = padded_trainer()
    trainer.tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    trainer.steps = TrainingSteps(trainer, trainer._job)
    trainer.steps.has_probed = True
    trainer._balance_batch(put_rows([(5, 3), (7, 2), (4, 9)]), {})
    pads = [key for key, tag in queue_content().items() if tag.get("is_padding")]
    rows = tq.kv_batch_get(keys=pads, partition_id=PARTITION, select_fields=["input_ids"])
    assert {int(each) for ids in rows["input_ids"] for each in ids} == {token}


def test_the_shuffle_changes_from_step_to_step_and_not_from_run_to_run():
    numbers = [UpdateNumber(step, update) for step in (7, 8) for update in (0, 1)]
    assert len({number.seed(0) for number in numbers}) == 4
    assert UpdateNumber(7, 0).seed(0) == numbers[0].seed(0) != numbers[0].seed(1)


@pytest.mark.parametrize(
    ("call", "name"),
    [("compute_log_prob", "log_prob"), ("compute_ref_log_prob", "ref"), ("infer_batch", "values")],
)
def test_a_lost_or_an_extra_output_is_an_error_with_both_counts(call, name):
    batch = put_rows([(5, 3), (7, 2), (4, 9)])
    trainer = padded_trainer()
    trainer._balance_batch(batch, {})
    padded = trainer.steps.current.padded_for(ACTOR)
    padded.plan.layouts[name] = padded.plan.layouts["log_prob"]
    sent = len(padded.inference_call(name, batch))

    def answer_with(change: int):
        def answer(rows):
            n = len(rows) + change
            keys, tags = [*rows.keys, "of_another"][:n], [*rows.tags, {}][:n]
            output = KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION)
            return SimpleNamespace(futures=[ray.put(output)]) if name == "values" else output

        return answer

    for change in (-1, 1):
        calls = {"execute_with_func_generator": lambda function: None, call: answer_with(change)}
        group = padded_group(SimpleNamespace(**calls), padded)
        with pytest.raises(
            PaddingDataError,
            match=rf"'{name}': outputs of {sent + change} came back for {sent} rows",
        ):
            getattr(group, call)(batch)
