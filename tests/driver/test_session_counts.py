"""What becomes of sessions, by verl's own replay buffers on the real TransferQueue."""

import pytest
import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.support.rows_in_queue import PARTITION, put_rows
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.driver.session_counts import SessionCounts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def put_prompts(**status_of: str) -> None:
    tags = [
        {"is_prompt": True, "status": status, "global_steps": 7} for status in status_of.values()
    ]
    tq.kv_batch_put(keys=list(status_of), partition_id=PARTITION, tags=tags)


def plural(trainer, batch) -> dict[str, float]:
    prefix, suffix = "padding/session/", "/total"
    return {
        name.removeprefix(prefix).removesuffix(suffix): count
        for name, count in trainer._session_counts.metrics(batch.keys).items()
    }


def test_each_session_that_brought_no_row_has_failed_or_was_empty():
    """Two sessions a prompt: all of a, one of b that came back empty, one of c that failed, none of
    d and of e."""
    trainer = padded_trainer()
    for _ in range(2):  # those of the step before count no more
        trainer._session_counts.start_step()
        put_rows([(3, 2)] * 5, ["a_0_0", "a_0_1", "a_1_0", "b_1_0", "c_0_0"])
        put_prompts(a="finished", b="finished", c="failure", d="failure", e="finished")
        batch, _ = trainer.replay_buffer.sample(7, PARTITION, 5)
        assert plural(trainer, batch) == {
            "configured": 10,
            "arrived": 4,
            "missing": 6,
            "failed": 1 + 2,
            "empty": 1 + 2,
        }
        tq.kv_clear(keys=batch.keys, partition_id=PARTITION)


def test_prompts_that_wait_or_are_replaced_do_not_count():
    trainer = padded_trainer("trainer.v1.trainer_mode=colocate_async")
    trainer.replay_buffer.refill_fn = lambda count: put_prompts(
        **{f"new{n}": "pending" for n in range(count)}
    )
    put_rows([(3, 2)] * 4, ["a_0_0", "a_1_0", "b_0_0", "c_0_0"])
    put_prompts(a="finished", b="failure", c="finished", d="running")
    batch, _ = trainer.replay_buffer.sample(7, PARTITION, 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "c_0_0"]
    assert plural(trainer, batch) == {
        "configured": 4,
        "arrived": 3,
        "missing": 1,
        "failed": 0,
        "empty": 1,
    }


def made(sampler: type[ReplayBuffer]) -> ReplayBuffer:
    """The trainer's replay buffer as one of a user's class, before anything watches it."""
    buffer = padded_trainer().replay_buffer
    del buffer.__dict__["_materialize_batch"]
    buffer.__class__ = sampler
    return buffer


def test_a_sampler_with_a_method_of_its_own_is_left_alone():
    class Grouped(ReplayBuffer):
        def _materialize_batch(self, partition_id, groups):
            return [key for group in groups for key in group]

    counts, buffer = SessionCounts(2), made(Grouped)
    del buffer.failure_keys
    assert counts.watch(buffer)._materialize_batch(PARTITION, [["a_0_0"], ["b_0_0"]]) == [
        "a_0_0",
        "b_0_0",
    ]
    assert counts.metrics(["a_0_0"]) == {"padding/session/arrived/total": 1}
