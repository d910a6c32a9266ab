"""The stand-in before a worker group, on the real TransferQueue: whatever a subclass may do with a
batch call."""

from collections import Counter
from types import SimpleNamespace

import pytest
import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from tests.support.padded_group import padded_group
from tests.support.padded_rows import plan_for, upsample
from tests.support.ranks_in_process import ANSWER, SHAPES, RanksInProcess
from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.config import PaddingConfig
from verl_padding.driver.worker_calls import PaddedWorkerGroup, wrap_worker_groups
from verl_padding.errors import PaddingDataError, PaddingError
from verl_padding.job.calls import CALLS
from verl_padding.job.savings import Savings
from verl_padding.pads.planned_call import CALL, IS_PADDING, read_column
from verl_padding.pads.template import PadTemplate
from verl_padding.worker.padded_engine import SCHEDULER_STEPS, STEPS, WORK
from verl_padding.worker.worker_check import check_in_worker

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (4, 4)]
KL = ["actor_rollout_ref.actor.use_kl_loss=true"]
CRITIC = ["algorithm.adv_estimator=gae"]


def work_of(ranks):
    """What workers answer that have done this."""
    return SimpleNamespace(non_tensor_batch={WORK: list(map(Counter, ranks))})


class Workers:
    """Two ranks that answer for all rows they are sent, and remember them and what the queue says
    of them."""

    world_size = 2

    def __init__(self):
        self._dispatch_info = {"actor": [0, 1], "ref": [0, 1], "train": [0, 1]}
        self.sent = []

    def execute_with_func_generator(self, function):
        steps = self.sent[-1].extra_info[CALL].mini_batches if self.sent else ()
        return work_of([{STEPS: len(steps), SCHEDULER_STEPS: int(bool(steps))}] * 2)

    def compute_log_prob(self, data, scale=1.0):
        return self._answer(data)

    compute_ref_log_prob = update_actor = compute_log_prob

    def infer_batch(self, data):
        return SimpleNamespace(futures=[ray.put(self._answer(data))])

    train_mini_batch = infer_batch

    def _answer(self, data):
        content = queue_content()
        assert set(data.keys) <= set(content), "rows that the workers cannot read"
        self.sent.append(data)
        return data


@pytest.fixture
def workers(empty_queue):
    return Workers()


def trainer_with(workers, *overrides):
    trainer = padded_trainer(*overrides)
    trainer.use_critic, trainer.use_reference_policy = CRITIC[0] in overrides, KL[0] in overrides
    group = PaddedWorkerGroup(workers, trainer.steps.update_for)
    trainer.actor_rollout_wg = trainer.ref_policy_wg = trainer.critic_wg = group
    return trainer, group


def pads_of(data):
    return [key.startswith("pad") for key in data.keys]


def assert_padded(data, batch):
    """Each row once, and as many pads as make the ranks' shares equal."""
    assert Counter(key for key in data.keys if not key.startswith("pad")) == Counter(batch.keys)
    assert len(data) % 2 == 0


@pytest.mark.parametrize("call", [call.method for call in CALLS])
def test_a_call_outside_of_a_step_is_refused(call, workers):
    _, group = trainer_with(workers, *KL)
    batch = put_rows(LENGTHS)
    content = queue_content()
    with pytest.raises(PaddingDataError, match=r"worker call '\w+': 7 rows"):
        getattr(group, call)(batch)
    assert not workers.sent
    assert queue_content() == content


def test_a_step_makes_the_calls_of_its_plan_with_all_of_its_rows(workers):
    trainer, group = trainer_with(workers)
    batch = put_rows(LENGTHS)
    trainer._balance_batch(batch, {})
    for call, rows in (("update_actor", batch.keys[:3]), ("compute_ref_log_prob", batch.keys)):
        with pytest.raises(PaddingDataError, match=f"{len(rows)} rows"):
            getattr(group, call)(batch.select_keys(rows))
    assert not workers.sent
    batch.reorder([*reversed(range(len(batch)))])
    output = group.compute_log_prob(batch)
    group.update_actor(batch)
    assert output.keys == batch.keys
    for sent in workers.sent:
        assert_padded(sent, batch)
        assert any(pads_of(sent))
    assert len(workers.sent[1].extra_info[CALL].mini_batches) == 2


def test_what_verl_sends_beside_the_batch_is_sent(workers):
    trainer, group = trainer_with(workers)
    batch = put_rows(LENGTHS)
    trainer._balance_batch(batch, {})
    for output in (group.compute_log_prob(batch, scale=2.0), group.compute_log_prob(batch, 2.0)):
        assert output.keys == batch.keys
    for sent in workers.sent:
        assert_padded(sent, batch)
    workers.compute_log_prob = lambda rows: rows
    data = object()
    assert group.compute_log_prob(data) is data


def test_what_verl_tells_a_reference_does_not_reach_the_critic(workers):
    trainer, _ = trainer_with(workers, *CRITIC)
    trainer.ref_in_actor = True
    answers = [torch.zeros(prompt + response) for prompt, response in LENGTHS]
    batch = put_rows(LENGTHS, log_probs=answers, values=answers)
    trainer._balance_batch(batch, {})
    trainer._compute_values(trainer._compute_ref_log_prob(batch, {}), {})
    reference, values = (sent.extra_info for sent in workers.sent)
    assert reference["no_lora_adapter"]
    assert "no_lora_adapter" not in values
    # Once verl takes it back by itself, worker_calls.py need not.
    workers.compute_log_prob, trainer.actor_rollout_wg = lambda rows: rows, workers
    batch = trainer._compute_ref_log_prob(batch, {})
    assert batch.extra_info["no_lora_adapter"]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_rank_gets_the_plans_local_batches_and_answers_find_their_rows(shape, empty_queue):
    """Plans for 64 ranks, through verl's own dispatch."""
    batch = put_rows([(3 + number, 1 + number % 5) for number in range(70)])
    batch.fields = ["prompts"]
    plan = plan_for(batch, dp_size=SHAPES[shape][0], mini=9)
    ranks = RanksInProcess.from_shape(shape, numbers_or_pad)
    padded = upsample(batch, plan, PadTemplate(eos_token_id=3, length=2))
    noted = []
    group = padded_group(ranks, padded, lambda call, tokens, epochs: noted.append((call, epochs)))
    output = group.compute_log_prob(batch)
    assert output.keys == batch.keys
    answers = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[ANSWER])[
        ANSWER
    ]
    assert answers.tolist() == list(range(70))
    batch.extra_info = {"epochs": 2, "mini_batch_size": 7}
    group.update_actor(batch)
    assert noted == [("log_prob", 1), ("actor", 2)], "epochs"
    assert plan.layouts["actor"].n_pads > 0
    for worker, dp_rank in zip(ranks.workers, ranks.dp_ranks(), strict=True):
        for name, epochs, got in (
            ("log_prob", 1, worker.passes),
            ("actor", 2, worker.mini_batches),
        ):
            local_batches = [
                ranks_of[dp_rank] for ranks_of in plan.layouts[name].local_batches
            ] * epochs
            assert got == [
                [row if row < 70 else None for row in local_batch] for local_batch in local_batches
            ]


def numbers_or_pad(data):
    """The number of each row, by the length of its prompt; None for a pad."""
    pads = read_column(data, IS_PADDING).tolist()
    lengths = [len(prompt) - 3 for prompt in data["prompts"].unbind()]
    return [None if is_pad else length for is_pad, length in zip(pads, lengths, strict=True)]


@pytest.mark.parametrize(
    ("call", "name"),
    [("compute_log_prob", "log_prob"), ("compute_ref_log_prob", "ref"), ("infer_batch", "values")],
)
def test_a_lost_or_an_extra_output_is_an_error_with_both_counts(call, name, empty_queue):
    batch = put_rows([(5, 3), (7, 2), (4, 9)])
    trainer = padded_trainer()
    trainer._balance_batch(batch, {})
    padded = trainer.steps.current
    padded.plan.layouts[name] = padded.plan.layouts["log_prob"]
    sent = len(padded.worker_batch(name, batch))

    def answer_with(change):
        def answer(rows):
            n = len(rows) + change
            keys, tags = [*rows.keys, "of_another"][:n], [*rows.tags, {}][:n]
            output = KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION)
            return SimpleNamespace(futures=[ray.put(output)]) if name == "values" else output

        return answer

    did = work_of([{}] * 2)
    for change in (-1, 1):
        calls = {"execute_with_func_generator": lambda function: did, call: answer_with(change)}
        group = padded_group(SimpleNamespace(**calls), padded)
        with pytest.raises(
            PaddingDataError,
            match=rf"'{name}': outputs of {sent + change} came back for {sent} rows",
        ):
            getattr(group, call)(batch)


def test_a_group_that_is_two_roles_is_wrapped_once():
    asked = []

    def ask(function):
        asked.append(function)
        return SimpleNamespace(non_tensor_batch={})

    actor, critic = (SimpleNamespace(execute_with_func_generator=ask) for _ in range(2))
    # Actor and reference are one object, as verl has it for an actor of adapters.
    trainer = SimpleNamespace(actor_rollout_wg=actor, ref_policy_wg=actor, critic_wg=critic)
    job = SimpleNamespace(savings=Savings(PaddingConfig()))
    assert len(wrap_worker_groups(trainer, job, update_for=None)) == 2
    assert len(asked) == 2 * asked.count(check_in_worker) == 4
    assert trainer.actor_rollout_wg is trainer.ref_policy_wg is not trainer.critic_wg


def test_a_call_that_no_plan_knows_is_refused_if_it_brings_rows(workers):
    """As data, all of it reaches the workers; what is no call stays itself."""
    workers.warm_up = lambda data, rounds=1: (data, rounds)
    _, group = trainer_with(workers)
    batch = put_rows(LENGTHS)
    for args, kwargs in (((batch,), {}), ((), {"data": batch, "rounds": 2})):
        with pytest.raises(PaddingDataError, match=f"{len(LENGTHS)} rows"):
            group.warm_up(*args, **kwargs)
    assert group.warm_up({"learning_rate": 1}, rounds=3) == ({"learning_rate": 1}, 3)
    assert group.world_size == 2
    assert not workers.sent


@pytest.mark.parametrize("done", [{STEPS: 1, SCHEDULER_STEPS: 1}, {STEPS: 2}, {}])
def test_an_update_whose_workers_have_not_done_as_planned_ends_the_job(done, workers, monkeypatch):
    trainer, group = trainer_with(workers)
    batch = put_rows(LENGTHS)
    trainer._balance_batch(batch, {})
    planned = {STEPS: 2, SCHEDULER_STEPS: 1}
    monkeypatch.setattr(
        workers, "execute_with_func_generator", lambda function: work_of([planned, done])
    )
    with pytest.raises(PaddingError, match=r"rank 1 .*\(2, 1\) are planned"):
        group.update_actor(batch)


def test_a_worker_group_that_no_plan_knows_gets_no_rows(empty_queue):
    group = RanksInProcess.from_shape("64", lambda data: [])
    job = SimpleNamespace(savings=Savings(PaddingConfig()))
    trainer = SimpleNamespace(judge_wg=group, alias=group, number=3)
    assert wrap_worker_groups(trainer, job, update_for=None) == []
    batch = put_rows(LENGTHS)
    for wrapped in (trainer.judge_wg, trainer.alias):
        for arguments in ((batch,), ([batch],), ({"rows": (batch,)},)):
            with pytest.raises(PaddingDataError, match=r"compute_log_prob.*7 rows"):
                wrapped.compute_log_prob(*arguments)
        assert wrapped.world_size == 64
