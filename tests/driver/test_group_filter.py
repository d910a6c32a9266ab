"""A filter of groups compares sessions, and those of one role, in the real TransferQueue."""

from functools import partial

import pytest
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.plan.row_keys import row_key, uid_of_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def put_prompts(scores, said):
    """Rows that end with these scores, and their prompts, whose sessions have ended."""
    ends = [torch.tensor([0.0, score]) for score in scores.values()]
    put_rows([(3, 2)] * len(scores), list(scores), rm_scores=ends, extra_fields=said)
    uids = list(dict.fromkeys(map(uid_of_key, scores)))
    tags = [{"is_prompt": True, "status": "finished", "global_steps": 7}] * len(uids)
    tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)


def buffer_of(kind, *overrides):
    mode = "sync" if kind is ReplayBuffer else "colocate_async"
    settings = (f"trainer.v1.trainer_mode={mode}", "algorithm.filter_groups.enable=true")
    buffer = padded_trainer(*settings, *overrides).replay_buffer
    assert type(buffer) is kind
    return buffer


@pytest.mark.parametrize("metric", ["reward", "acc"])
@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_a_filter_of_groups_compares_sessions_where_verls_compares_rows(kind, metric):
    """Of three prompts, a has one session, b two of one score, c two of two scores; the first in
    one row or two."""

    def filtered(rows):
        """uids that verl filters out, and those that we do."""
        scores = {row_key(uid, 0, index): 0.1 for uid in "abc" for index in range(rows)}
        scores |= {"b_1_0": 0.1, "c_1_0": 0.0}
        put_prompts(scores, [{"reward_extra_info": {"acc": score}} for score in scores.values()])
        buffer = buffer_of(kind, f"algorithm.filter_groups.metric={metric}")
        found = []
        for filter_groups in (
            partial(kind._dapo_filtered_keys, buffer),
            buffer._dapo_filtered_keys,
        ):
            buffer._dapo_classification_cache.clear()
            buffer._sync_metadata_from_transfer_queue()
            found.append(filter_groups(PARTITION)[0])
            assert buffer.partitions[PARTITION].keys() == scores.keys(), "the batch has all rows"
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
        return found

    (verls_one, ours_one), (verls_two, ours_two) = map(filtered, (1, 2))
    assert verls_one == ours_one == ours_two == {"b"}
    # The one session of a is a group by itself; and of three copies of 0.1 NumPy finds a deviation
    # that is not 0.
    assert verls_two == ({"a", "b"} if metric == "reward" else {"a"})


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
def test_a_filter_of_groups_leaves_out_what_no_role_learns_from(kind):
    """The leads of a, b and d earn the same; the helpers of a do not, and d has but one."""
    scores = {"a_0_0": 0.0, "a_0_1": 1.0, "a_1_0": 1.0, "a_1_1": 1.0}
    scores |= {"b_0_0": 0.5, "b_0_1": 1.0, "b_1_0": 0.5, "b_1_1": 1.0}
    scores |= {"c_0_0": 0.0, "c_1_0": 1.0, "d_0_0": 1.0, "d_0_1": 1.0, "d_1_1": 1.0}
    leads = {key for key in scores if key.endswith("1") or key[0] == "c"}
    said = [{"role": "lead" if key in leads else "helper"} for key in scores]
    ends = [torch.tensor([0.0, score]) for score in scores.values()]
    put_rows([(3, 2)] * len(scores), list(scores), rm_scores=ends, extra_fields=said)
    tags = [{"is_prompt": True, "status": "finished", "global_steps": 7}] * 4
    tq.kv_batch_put(keys=list("abcd"), partition_id=PARTITION, tags=tags)
    mode = "sync" if kind is ReplayBuffer else "colocate_async"
    settings = f"trainer.v1.trainer_mode={mode}", "algorithm.filter_groups.enable=true"
    settings = *settings, "algorithm.filter_groups.metric=reward"

    def filtered(*more):
        buffer = padded_trainer(*settings, *more).replay_buffer
        found = []
        for _ in range(2):  # the second time, verl remembers what it has read
            buffer._sync_metadata_from_transfer_queue()
            found.append(buffer._dapo_filtered_keys(PARTITION))
            assert buffer.partitions[PARTITION].keys() == scores.keys()
            assert buffer.finished_keys[PARTITION] == set("abcd")
        assert found[0] == found[1]
        return found[0][0], dict(found[0][1])

    assert filtered()[0] == {"a", "b", "d"}
    assert filtered("padding.baseline=role") == ({"b"}, {1.0: 1})
