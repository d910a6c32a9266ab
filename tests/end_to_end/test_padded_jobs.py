"""Real jobs through ``verl.trainer.main_ppo``: two FSDP2 ranks, real Ray, real TransferQueue."""

import json
import math
from collections import Counter
from itertools import islice

import pytest
from transfer_queue.storage import simple_storage

from tests.support.agent import FAILING_STEP, LONELY_STEP
from tests.support.jobs import ACTOR, JobFacts, run_job
from tests.support.tolerance import LOG_PROB_AGREEMENT
from verl_padding.job.calls import ACTOR as ACTOR_CALL
from verl_padding.job.calls import LOG_PROB
from verl_padding.plan.row_keys import session_of_key
from verl_padding.record.step_file import read_steps
from verl_padding.runs.run_files import ROLLOUTS
from verl_padding.timing.timings import timings_by_call

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

PROMPTS, SESSIONS, MINI = 6, 3, 2
COUNTS = ("configured", "arrived", "missing", "failed", "empty")
MISHAPS = "actor_rollout_ref.rollout.agent.default_agent_loop=varying_turns_with_mishaps"
STEPS = 3
HAS_DISK = hasattr(simple_storage, "HybridStorageUnitData")  # not in TransferQueue 0.1.10
OFFLOAD = "+transfer_queue.backend.SimpleStorage.ssd_offload"


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """GRPO by the plan's micro-batches; one step has a single row, in another sessions fail."""
    return run_job(
        tmp_path_factory.mktemp("grpo"),
        "+padding=prompt",
        "padding.packer=plan",
        "padding.timing=true",
        "padding.record=true",
        "trainer.v1.trainer_mode=sync",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=96",
        MISHAPS,
        steps=STEPS,
    )


def split(steps, per_batch):
    assert sum(per_batch) == len(steps)
    steps = iter(steps)
    return [list(islice(steps, n)) for n in per_batch]


def assert_no_pad_outside_worker_calls(facts: JobFacts) -> None:
    assert facts.batches
    assert facts.queue
    assert all(note["pads"] == 0 for note in facts.batches + facts.queue)
    assert all(rows.dumped_pads == 0 for rows in facts.rows.values())
    for step, metrics in facts.metrics.items():
        assert metrics["padding/real_rows/total"] == facts.rows[step].real
        assert metrics["padding/pad_rows/total"] > 0 or facts.rows[step].real % 2 == 0


def assert_finite_and_agreeing(facts: JobFacts) -> None:
    for step, metrics in facts.metrics.items():
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        assert metrics["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT, step


def test_every_grpo_batch_takes_the_configured_steps_of_real_rows(grpo):
    real = [grpo.rows[step].real for step in range(1, STEPS + 1)]
    assert len(set(real)) == STEPS, "the row counts were meant to vary"
    assert any(n % (MINI * SESSIONS) for n in real), "no row count was awkward"
    expected = [PROMPTS // MINI] * STEPS
    expected[LONELY_STEP - 1] = 1
    for step, mini_batches in enumerate(split(grpo.optimizer_steps[ACTOR], expected), start=1):
        assert sum(m.real_rows for m in mini_batches) == grpo.rows[step].real
        assert min(m.real_rows for m in mini_batches) >= 1
        assert grpo.metrics[step]["padding/actor/optimizer_steps/total"] == len(mini_batches)
    assert sum(m.rows - m.real_rows for m in grpo.optimizer_steps[ACTOR]) > 0, "no pad was met"


def test_a_step_with_one_real_row_trains_on_it_and_warns(grpo):
    assert grpo.rows[LONELY_STEP].real == 1
    assert grpo.metrics[LONELY_STEP]["padding/actor/optimizer_steps/total"] == 1
    assert f"verl_padding: step {LONELY_STEP}: " in grpo.log


def test_failed_sessions_cost_rows_and_nothing_else(grpo):
    assert "this session fails on purpose" in grpo.log
    assert grpo.metrics[FAILING_STEP]["padding/actor/optimizer_steps/total"] == PROMPTS // MINI


def test_each_session_that_brings_no_row_is_counted_as_failed_or_as_empty(grpo):
    configured = PROMPTS * SESSIONS
    for step, metrics in grpo.metrics.items():
        arrived = len({session_of_key(uid) for uid in dumped(grpo, step)})
        missing = configured - arrived
        assert (missing > 0) is (step in (LONELY_STEP, FAILING_STEP))
        failed, empty = (missing, 0) if step == FAILING_STEP else (0, missing)
        counts = [metrics[f"padding/session/{name}/total"] for name in COUNTS]
        assert counts == [configured, arrived, missing, failed, empty]


def dumped(facts: JobFacts, step: int) -> dict[str, float]:
    """The score of each row, by its key, from verl's rollout dump."""
    lines = map(json.loads, (facts.folder / ROLLOUTS / f"{step}.jsonl").read_text().splitlines())
    return {line["uid"]: line["score"] for line in lines}


def test_nothing_but_a_worker_call_sees_a_pad(grpo):
    assert_no_pad_outside_worker_calls(grpo)


def test_performance_counts_all_that_ranks_get_and_accuracy_real_rows(grpo):
    for step, metrics in grpo.metrics.items():
        lengths = metrics["padding/real_rows/total"] * (
            metrics["prompt_length/mean"] + metrics["response_length/mean"]
        )
        # A pad has two tokens.
        tokens = round(lengths) + 2 * metrics["padding/actor/pad_rows/total"]
        assert metrics["perf/total_num_tokens"] == tokens == 2 * metrics["global_seqlen/mean"]
        throughput = tokens / (2 * metrics["timing_s/step"])
        assert metrics["perf/throughput"] == pytest.approx(throughput)
        assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(
            1000 * metrics["timing_s/update_actor"] / tokens
        )
        assert metrics["critic/score/mean"] == pytest.approx(
            sum(dumped(grpo, step).values()) / metrics["padding/real_rows/total"]
        )


def test_no_metric_is_nan_and_rollout_and_trainer_agree(grpo):
    assert_finite_and_agreeing(grpo)


@pytest.mark.slow
def test_a_mixture_of_experts_trains_with_recorded_routes(tmp_path):
    facts = run_job(
        tmp_path,
        "+padding=lcm",
        "padding.packer=plan",
        "actor_rollout_ref.rollout.agent.default_agent_loop=varying_turns_with_mishaps_and_routes",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=72",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=72",
        "actor_rollout_ref.rollout.moe_load_balance_metrics_interval=1",
        steps=3,
        model_kind="qwen3_moe",
    )
    assert_no_pad_outside_worker_calls(facts)
    assert_finite_and_agreeing(facts)
    assert facts.rows[LONELY_STEP].real == 1
    assert facts.metrics[LONELY_STEP]["padding/log_prob/micro_batches"] == 1
    assert facts.metrics[1]["padding/log_prob/micro_batches"] > 3
    for metrics in facts.metrics.values():
        # Of the workers, and of the plan, which has the pass take over the micro-batches of the
        # update.
        taken = (
            metrics["padding/actor/micro_batches"] * metrics["padding/actor/optimizer_steps/total"]
        )
        assert round(metrics["padding/log_prob/micro_batches"] - taken) == 0
        assert metrics["rollout/moe/routed_experts_found"] == 1
    assert "this session fails on purpose" in facts.log
    real = [facts.rows[step].real for step in (1, 2, 3)]
    assert sum(m.real_rows for m in facts.optimizer_steps[ACTOR]) == sum(real)
    routes = [slots for m in facts.optimizer_steps[ACTOR] for slots in m.pad_routes]
    assert routes, "no pad reached an update with its routes"
    assert all(len(set(slots)) == 2 and set(slots) <= set(range(4)) for slots in routes)
    load = [sum(slots.count(expert) for slots in routes) for expert in range(4)]
    assert max(load) - min(load) <= len(facts.optimizer_steps[ACTOR]) * 2


@pytest.mark.slow
def test_an_lcm_job_takes_verls_steps_and_computes_all_pads(tmp_path):
    """``+padding=lcm``: mini-batches of 120 rows, as many as verl makes; TransferQueue has rows on
    disk, if it can."""
    prompts, mini, sessions, disk = 45, 15, 8, tmp_path / "disk"
    disk.mkdir()
    facts = run_job(
        tmp_path / "job",
        "+padding=lcm",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
        f"actor_rollout_ref.rollout.n={sessions}",
        *(
            f"{OFFLOAD}.{setting}"
            for setting in ("enabled=true", f"path={disk}", "threshold_bytes=1")
        ),
        steps=1,
    )
    assert_no_pad_outside_worker_calls(facts)
    assert_finite_and_agreeing(facts)
    assert bool(list(disk.iterdir())) == HAS_DISK, "nothing was meant to stay in memory"
    size, real_rows, steps = mini * sessions, facts.rows[1].real, facts.optimizer_steps[ACTOR]
    assert real_rows > prompts * sessions
    assert real_rows % size, "the row count was meant to be awkward"
    assert len(steps) == math.ceil(real_rows / size) > prompts // mini
    real = [step.real_rows for step in steps]
    assert [step.rows for step in steps] == [size] * len(steps)
    pads = [facts.metrics[1][f"padding/{name}pad_rows/total"] for name in ("", "actor/")]
    assert pads == [size * len(steps) - real_rows] * 2
    tokens = facts.metrics[1]["perf/total_num_tokens"] - 2 * pads[0]
    mean = facts.metrics[1]["prompt_length/mean"] + facts.metrics[1]["response_length/mean"]
    assert tokens == pytest.approx(real_rows * mean)
    assert sum(real) == real_rows
    assert max(real) - min(real) <= 1
    assert all(step.moved for step in steps)


def test_a_timed_job_has_a_lap_of_each_micro_batch_with_every_row_in_it(grpo):
    keys = {note["step"]: note["keys"] for note in grpo.batches}
    for step, metrics in grpo.metrics.items():
        (timed,) = read_steps(grpo.folder / "steps" / f"{step}.jsonl")
        assert (timed.step, list(timed.keys)) == (step, keys[step])
        by_call = timings_by_call(timed.timings)
        assert set(by_call) == {LOG_PROB, ACTOR_CALL}
        for call, timings in by_call.items():
            timed_rows = Counter(row for timing in timings for row in timing.rows)
            assert timed_rows == dict.fromkeys(range(len(timed.keys)), 1)
            of_ranks = Counter((timing.mini_batch, timing.micro_batch) for timing in timings)
            assert set(of_ranks.values()) == {2}, "of both ranks"
            assert all(timing.seconds > 0 for timing in timings)
            for rank in (0, 1):
                seconds = sum(timing.seconds for timing in timings if timing.rank == rank)
                assert seconds < metrics[f"padding/{call}/seconds"]
            assert metrics[f"padding/{call}/prediction_error"] >= 0
        pads = sum(timing.pads for timing in by_call[ACTOR_CALL])
        assert pads == metrics["padding/actor/pad_rows/total"]
        assert metrics["timing_s/padding/timing"] > 0


def test_a_recorded_job_has_each_row_where_the_clocks_have_seen_it(grpo):
    for step in grpo.metrics:
        (recorded,) = read_steps(grpo.folder / "steps" / f"{step}.jsonl")
        assert [row.key for row in recorded.rows] == list(recorded.keys)
        assert {row.key: row.reward for row in recorded.rows} == pytest.approx(dumped(grpo, step))
        assert all(row.age == 0 and row.trained_tokens > 0 for row in recorded.rows)
        for timing in recorded.timings:
            for row in timing.rows:
                place = recorded.rows[row].places[timing.call]
                assert (place.rank, place.micro_batch) == (timing.rank, timing.micro_batch)
                assert place.mini_batch == timing.mini_batch


def test_the_plan_cuts_the_micro_batches_of_pass_and_update(grpo):
    metrics = grpo.metrics[1]
    for call in (ACTOR_CALL, LOG_PROB):
        assert metrics[f"padding/{call}/micro_batches"] > 1, call
        assert 0.3 < metrics[f"padding/{call}/packing_efficiency"] <= 1, call
        assert 1 <= metrics[f"padding/{call}/micro_batch_imbalance"] < 1.3, call
        assert metrics[f"padding/{call}/seconds"] > 0, call
    assert not [name for name in metrics if name.startswith("actor/padding/")]
