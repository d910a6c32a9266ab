"""A job is killed between an update and its checkpoint, and resumed: no row is trained twice, and
none is lost.
"""

from collections import Counter

import pytest
import transfer_queue as tq

from tests.support import probe
from tests.support.jobs import run_job
from tests.support.rows_in_queue import empty_queue, queue_content

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

SAVED, KILLED, LAST = 2, 4, 6
COLOCATE = ["trainer.v1.trainer_mode=colocate_async"]
SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
]
GAE = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_mini_batch_size=3"]


def run_killed_and_resumed(folder, place, *overrides):
    checkpoints = folder / "checkpoints"
    common = [
        "+padding=prompt",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={checkpoints}",
        f"trainer.save_freq={SAVED}",
        *overrides,
    ]
    killed = run_job(
        folder / "killed", *common, steps=LAST, probed={probe.KILL: f"{place}:{KILLED}"}
    )
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    resumed = run_job(folder / "resumed", *common, steps=LAST)
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(LAST)
    return killed, resumed, checkpoints


def assert_each_prompt_counts_once(killed, resumed):
    """In the weights that come out of it: those of the checkpoint, trained on by the resumed
    run."""
    assert {note["step"] for note in killed.batches} == set(range(1, KILLED + 1))
    assert {note["step"] for note in resumed.batches} == set(range(SAVED + 1, LAST + 1))
    trained = killed.trained_questions(range(1, SAVED + 1)) + resumed.trained_questions(
        range(SAVED + 1, LAST + 1)
    )
    assert len(trained) == LAST * 6
    assert max(Counter(trained).values()) == 1, "a prompt was trained twice"
    waiting = resumed.queue[-1]["waiting"]
    assert not set(trained) & set(waiting)
    # The prompts come in order, so what was fetched is a first part of the data.
    fetched = {int(text.rstrip("?")) for text in [*trained, *waiting]}
    assert fetched == set(range(len(fetched))), "a prompt was lost"


def snapshot(folder):
    """Tags of what a checkpoint holds of the queue, by key."""
    tq.load_checkpoint(folder / "transfer_queue")
    try:
        return queue_content()
    finally:
        empty_queue()


def assert_snapshots_hold_no_trained_row(facts, checkpoints, steps):
    for step in steps:
        content = snapshot(checkpoints / f"global_step_{step}")
        assert content, "nothing was in flight"
        assert not content.keys() & {
            key for note in facts.batches if note["step"] <= step for key in note["keys"]
        }
        assert not any(tag.get("is_padding", False) for tag in content.values())
        prompts = {key for key, tag in content.items() if tag.get("is_prompt")}
        assert prompts
        assert {key.split("_")[0] for key in content} == prompts, "rows that nobody can sample"


def assert_finished_groups_are_trained_whole(resumed, checkpoint):
    content = snapshot(checkpoint)
    groups = {
        key for key, tag in content.items() if tag.get("is_prompt") and tag["status"] == "finished"
    }
    finished = {key for key in content.keys() - groups if key.split("_")[0] in groups}
    trained = [key for note in resumed.batches for key in note["keys"]]
    assert finished, "no group was finished ahead of its step"
    assert all(trained.count(key) == 1 for key in finished), "a row of a finished group was lost"
    prompts = {key.split("_")[0] for key in finished}
    assert {key for key in trained if key.split("_")[0] in prompts} == finished


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mode", "steps_a_batch", "place"),
    [
        # Much is generated at once, so that some groups end with those that are sampled and wait
        # for a later step.
        ([*COLOCATE, *GAE, "trainer.v1.colocate_async.num_warmup_batches=3"], 3, "update"),
        ([*SEPARATE, *GAE], 2, "save"),
    ],
    ids=["colocate_async GAE", "separate_async 2 GAE"],
)
def test_a_resumed_run_trains_no_row_twice_and_loses_none(mode, steps_a_batch, place, tmp_path):
    killed, resumed, checkpoints = run_killed_and_resumed(tmp_path, place, *mode)
    assert_each_prompt_counts_once(killed, resumed)
    assert_snapshots_hold_no_trained_row(killed, checkpoints, [SAVED])
    assert_snapshots_hold_no_trained_row(resumed, checkpoints, [KILLED, LAST])
    for metrics in [*killed.metrics.values(), *resumed.metrics.values()]:
        assert metrics["padding/actor/optimizer_steps/total"] == steps_a_batch
    if "num_warmup_batches" in mode[-1]:
        assert_finished_groups_are_trained_whole(resumed, checkpoints / f"global_step_{SAVED}")
    assert all(
        rows.dumped_pads == 0 and rows.real > 0
        for rows in [*killed.rows.values(), *resumed.rows.values()]
    )
    assert sorted(resumed.rows) == list(range(SAVED + 1, LAST + 1)), (
        "the dump has its rows, though they were set aside"
    )
    assert sum(metrics["padding/pad_rows/total"] for metrics in resumed.metrics.values()) > 0
