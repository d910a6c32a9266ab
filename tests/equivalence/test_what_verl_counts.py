"""Where verl counts rows and a user means sessions: both on a session of one row, and of two.

Prompt ``a`` has two sessions: one with a score of 1, in one row or in two, and one with a score of 0 in one row. A test
that fails because verl gives the same for both means that verl counts sessions there.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.driver.batch_metrics import session_metrics
from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.pads.columns import REAL_ROWS
from verl_padding.pads.queue import read_fields
from verl_padding.plan.row_keys import row_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

TOKENS = 6
"""Response tokens of each session, however many rows it has."""


def at_the_end(score, tokens):
    return torch.tensor([*[0.0] * (tokens - 1), score])


def put_sessions(rows, uids="a"):
    """Of each prompt, a session of ``rows`` rows with a score of 1, and one of one row with a score of 0."""
    keys, lengths, scores, turns, steps = [], [], [], [], []
    for uid in uids:
        keys += [*[row_key(uid, 0, index) for index in range(rows)], row_key(uid, 1, 0)]
        lengths += [*[(3, TOKENS // rows)] * rows, (3, TOKENS)]
        scores += [*[1.0] * rows, 0.0]
        turns += [*[4 // rows] * rows, 2]
        steps += [*[1] * rows, 5]
    ends = [at_the_end(score, tokens) for score, (_, tokens) in zip(scores, lengths, strict=True)]
    told = [{"reward_extra_info": {"acc": score}} for score in scores]
    batch = put_rows(lengths, keys, rm_scores=ends, advantages=ends, returns=ends, num_turns=turns, extra_fields=told)
    batch.tags = [
        tag | {"min_global_steps": step, "max_global_steps": step} for tag, step in zip(batch.tags, steps, strict=True)
    ]
    return batch


def of_one_and_two_rows(count):
    """What ``count`` gives for sessions of one row, and of two."""
    found = []
    for rows in (1, 2):
        found.append(count(rows))
        if left := list(queue_content()):
            tq.kv_clear(keys=left, partition_id=PARTITION)
    return found


def test_means_of_a_batch_are_over_rows_and_ours_over_sessions():
    def metrics(rows):
        trainer, found = padded_trainer(), {}
        trainer.use_critic, trainer._get_n_gpus_for_throughput = False, lambda: 2
        batch = put_sessions(rows)
        PPOTrainer._compute_metrics(trainer, batch, found, {"step": 1.0}, global_steps=7, epoch=0)
        masks = read_fields(batch.keys, PARTITION, ["response_mask"])["response_mask"]
        return found, session_metrics([TrainedRows.read(batch, masks.unbind(), compare=False)])

    (one, our_one), (two, our_two) = of_one_and_two_rows(metrics)
    verls = {
        "critic/score/mean": (1 / 2, 2 / 3),
        "critic/rewards/mean": (1 / 2, 2 / 3),
        "response_length/mean": (6, 4),
        "num_turns/mean": (3, 2),
        "training/num_turns/mean": (3, 2),
        "training/off_policy/trajectory_staleness/mean": (3, 11 / 3),
    }
    for name, values in verls.items():
        assert (one[name], two[name]) == pytest.approx(values), name
    for name, value in {"score": 0.5, "response_length": 6, "num_turns": 3}.items():
        assert our_one[f"padding/session/{name}/mean"] == our_two[f"padding/session/{name}/mean"] == value
    assert our_two["padding/session/rows/mean"] == 1.5


def test_verl_divides_by_configured_sessions_and_a_padded_job_by_its_rows():
    def divided_by(rows):
        trainer = padded_trainer()
        sent = SimpleNamespace(update_actor=lambda batch: TensorDict({}))
        batch = put_sessions(rows, "abcd")
        trainer._balance_batch(batch, {})
        assert trainer._padded_batch.plan.layouts["actor"].n_mini_batches == 2
        call = trainer._padded_batch.update_call("actor", batch)
        data = tq.kv_batch_get(keys=call.keys, partition_id=PARTITION, select_fields=[REAL_ROWS])
        trainer.actor_rollout_wg = sent
        with pytest.raises(KeyError):  # the metrics of workers, which there are none of
            PPOTrainer._update_actor(trainer, batch, {})
        return batch.extra_info["global_batch_size"], set(data[REAL_ROWS].flatten().tolist())

    assert of_one_and_two_rows(divided_by) == [(4, {4}), (4, {6})]
    assert padded_trainer()._get_required_batch_multiple(2) == 4


@pytest.mark.parametrize("metric", ["reward", "acc"])
@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_a_filter_of_groups_compares_sessions_where_verls_compares_rows(kind, metric):
    mode = "sync" if kind is ReplayBuffer else "colocate_async"
    settings = ("enable=true", f"metric={metric}")

    def filtered(rows):
        """uids that verl filters out, and those that we do: a has one session, b two of one score, c two of two."""
        same = [*[row_key("a", 0, index) for index in range(rows)], *[row_key("b", 0, index) for index in range(rows)]]
        same.append("b_1_0")
        told = [{"reward_extra_info": {"acc": 0.1}}] * len(same)
        put_rows([(3, 2)] * len(same), same, rm_scores=[at_the_end(0.1, 2)] * len(same), extra_fields=told)
        put_sessions(rows, "c")
        tags = [{"is_prompt": True, "status": "finished", "global_steps": 7}] * 3
        tq.kv_batch_put(keys=["a", "b", "c"], partition_id=PARTITION, tags=tags)
        filters = [f"algorithm.filter_groups.{setting}" for setting in settings]
        buffer = padded_trainer(*filters, f"trainer.v1.trainer_mode={mode}").replay_buffer
        assert type(buffer) is kind
        found = []
        for filter_groups in (partial(kind._dapo_filtered_keys, buffer), buffer._dapo_filtered_keys):
            buffer._dapo_classification_cache.clear()
            buffer._sync_metadata_from_transfer_queue()
            found.append(filter_groups(PARTITION)[0])
            assert buffer.partitions[PARTITION].keys() == queue_content().keys() - set("abc"), "the batch has all rows"
        return found

    (verls_one, ours_one), (verls_two, ours_two) = of_one_and_two_rows(filtered)
    assert verls_one == ours_one == ours_two == {"b"}
    # The one session of a is a group by itself; and of three copies of 0.1 NumPy finds a deviation that is not 0.
    assert verls_two == ({"a", "b"} if metric == "reward" else {"a"})
