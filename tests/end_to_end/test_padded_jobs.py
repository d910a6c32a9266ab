"""Real jobs through ``verl.trainer.main_ppo``: two FSDP2 ranks, real Ray, real TransferQueue."""

import json
import math

import pytest
from transfer_queue.storage import simple_storage

from tests.end_to_end.test_beside_one_process import (
    MINI,
    PROMPTS,
    RANKS,
    actor_of,
    assert_trained_as_by_one_process,
    by_training_step,
    run,
)
from tests.support.agent import FAILING_STEP, LONELY_STEP
from tests.support.jobs import ACTOR
from tests.support.tolerance import LOG_PROB_AGREEMENT
from verl_padding.job.calls import ACTOR as ACTOR_CALL
from verl_padding.job.calls import LOG_PROB, REF
from verl_padding.plan.row_keys import session_of_key
from verl_padding.record.run_files import ROLLOUTS
from verl_padding.record.step_file import read_steps

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

SESSIONS = 3
MISHAPS = "actor_rollout_ref.rollout.agent.default_agent_loop=varying_turns_with_mishaps"
STEPS = 3
HAS_DISK = hasattr(simple_storage, "HybridStorageUnitData")  # not in TransferQueue 0.1.10


@pytest.fixture(scope="module")
def lcm(tmp_path_factory):
    """GRPO with a reference, by the plan's micro-batches, on a model that sees; of one batch, one
    rank has pads alone, and of another, sessions fail. TransferQueue has rows on disk, if it
    can."""
    folder = tmp_path_factory.mktemp("lcm")
    (folder / "disk").mkdir()
    offload = ("enabled=true", f"path={folder / 'disk'}", "threshold_bytes=1")
    return run(
        folder,
        "+padding=lcm",
        "padding.packer=plan",
        "padding.record=true",
        "trainer.v1.trainer_mode=sync",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=96",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=96",
        MISHAPS,
        *(f"+transfer_queue.backend.SimpleStorage.ssd_offload.{each}" for each in offload),
        steps=STEPS,
        model_kind="qwen3_vl",
    )


def assert_finite_and_agreeing(facts):
    for step, metrics in facts.metrics.items():
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        assert metrics["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT, step


def test_an_lcm_job_trains_as_one_process_and_its_ranks_compute_all_pads(lcm):
    size = MINI * SESSIONS
    real = [lcm.rows[step].real for step in range(1, STEPS + 1)]
    assert real[0] % size
    assert real[LONELY_STEP - 1] == 1, "one rank was meant to have pads alone"
    assert any((lcm.folder / "disk").iterdir()) == HAS_DISK, "nothing was meant to stay in memory"
    steps = by_training_step(lcm, ACTOR, [math.ceil(n_rows / size) for n_rows in real])
    has_image = {bool(row["images"]) for each in steps[0] for row in each.rows}
    assert has_image == {True, False}, "some rows were meant to have images"
    for step, (taken, n_rows) in enumerate(zip(steps, real, strict=True), start=1):
        assert sum(len(each.rows) for each in taken) == n_rows
        assert all(each.n_rows_D == [size // RANKS] * RANKS for each in taken)
        metrics = lcm.metrics[step]
        pads = size * len(taken) - n_rows
        assert [metrics[f"padding/{each}pad_rows/total"] for each in ("", "actor/")] == [pads, pads]
        tokens = sum(len(row["input_ids"]) for each in taken for row in each.rows)
        assert metrics["perf/total_num_tokens"] == tokens + metrics["padding/pad_tokens/total"]
    assert_trained_as_by_one_process(actor_of(lcm, "qwen3_vl", STEPS), steps, ACTOR)


def test_sessions_that_bring_a_row_are_counted(lcm):
    for step, metrics in lcm.metrics.items():
        arrived = len({session_of_key(uid) for uid in dumped(lcm, step)})
        assert metrics["padding/session/arrived/total"] == arrived
        assert (arrived < PROMPTS * SESSIONS) or step not in (LONELY_STEP, FAILING_STEP)


def dumped(facts, step):
    """The score of each row, by its key, from verl's rollout dump."""
    lines = map(json.loads, (facts.folder / ROLLOUTS / f"{step}.jsonl").read_text().splitlines())
    return {line["uid"]: line["score"] for line in lines}


def test_nothing_but_a_worker_call_sees_a_pad(lcm):
    assert lcm.batches
    assert lcm.queue
    assert all(note["pads"] == 0 for note in lcm.batches + lcm.queue)
    assert all(rows.dumped_pads == 0 for rows in lcm.rows.values())
    for step, metrics in lcm.metrics.items():
        assert metrics["padding/real_rows/total"] == lcm.rows[step].real


def test_no_metric_is_nan_and_rollout_and_trainer_agree(lcm):
    assert_finite_and_agreeing(lcm)


def test_a_recorded_job_has_each_row_with_its_place_in_each_call(lcm):
    keys = {note["step"]: note["keys"] for note in lcm.batches}
    for step in lcm.metrics:
        (recorded,) = read_steps(lcm.folder / "steps" / f"{step}.jsonl")
        assert (recorded.step, list(recorded.keys)) == (step, keys[step])
        assert [row.key for row in recorded.rows] == keys[step]
        assert {row.key: row.reward for row in recorded.rows} == pytest.approx(dumped(lcm, step))
        assert all(row.staleness == 0 and row.trained_tokens > 0 for row in recorded.rows)
        assert all(set(row.places) == {LOG_PROB, REF, ACTOR_CALL} for row in recorded.rows)
