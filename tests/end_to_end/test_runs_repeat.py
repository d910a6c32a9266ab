"""The same job, run again: the same rollouts and metrics, although no session ends when it ended
before.

And a job whose rows extend each other, with shared prefixes and without.
"""

import json
import re

import numpy as np
import pytest

from tests.support.fsdp2_workers import make_value_model
from tests.support.jobs import run_job
from tests.support.tolerance import ADAM_EPS
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.pads.prompt_order import place_of
from verl_padding.plan.row_keys import parts_of_key
from verl_padding.record.run_files import ROLLOUTS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, PROMPTS, SESSIONS = 3, 6, 3
MEASURED = re.compile(r"timing|seconds|memory|perf/(mfu|throughput|time)")
"""Metrics of time and memory; all others repeat."""


def run(folder):
    """GRPO on sub-agents who are asked the same at once; data set and mini-batches are shuffled;
    with validation."""
    return run_job(
        folder,
        "+padding=prompt",
        "actor_rollout_ref.rollout.agent.default_agent_loop=subagents_in_any_order",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",  # a server a rank
        "data.shuffle=true",
        "actor_rollout_ref.actor.shuffle=true",
        "trainer.test_freq=3",
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return run(tmp_path_factory.mktemp("first")), run(tmp_path_factory.mktemp("again"))


def row_name(key):
    """Step and place of the prompt, session, row: what of a row's key repeats. A prompt of
    validation has no place."""
    uid, session, index = parts_of_key(key)
    return place_of(uid), int(session), int(index)


def rollouts(facts):
    """Step -> rows of the dump, which verl sorts by uid."""
    lines = {
        int(path.stem): path.read_text().split("\n")[:-1]
        for path in (facts.folder / ROLLOUTS).glob("*.jsonl")
    }
    return {
        step: [
            (row_name(row["uid"]), row["input"], row["output"], row["score"])
            for row in map(json.loads, rows)
        ]
        for step, rows in lines.items()
    }


def repeating_metrics(facts):
    return {
        step: {name: value for name, value in metrics.items() if not MEASURED.search(name)}
        for step, metrics in facts.metrics.items()
    }


def test_each_row_of_each_step_is_generated_again_letter_by_letter(both):
    rows, again = map(rollouts, both)
    assert sorted(rows) == [1, 2, 3]
    for step in rows:
        assert len(rows[step]) > PROMPTS * SESSIONS
        assert len({name for name, *_ in rows[step]}) == len(rows[step])
        assert {name[0] for name, *_ in rows[step]} == {(step, place) for place in range(PROMPTS)}
    assert len({output for step in rows for _, _, output, _ in rows[step]}) > 50, (
        "responses that differ"
    )
    assert again == rows


def test_each_metric_of_each_step_is_the_same_to_the_last_bit(both):
    metrics, again = map(repeating_metrics, both)
    assert sorted(metrics) == [1, 2, 3]
    assert all(len(values) > 60 for values in metrics.values())
    assert any(name.startswith("val-") for name in metrics[3])
    assert any(name.startswith("rollout_corr/") for name in metrics[1])
    for step, values in again.items():
        for name, value in values.items():
            # verl adds up what validation has earned in the order in which its sessions ended.
            same = (
                pytest.approx(metrics[step][name], rel=1e-12)
                if name.startswith("val-")
                else metrics[step][name]
            )
            assert value == same, (step, name)
        assert values.keys() == metrics[step].keys()


def names_of(batches):
    return [[row_name(key) for key in batch["keys"]] for batch in batches]


def test_the_trainer_gets_the_rows_in_the_order_of_the_data_set(both):
    trained, again = (names_of(facts.batches) for facts in both)
    assert len(trained) == STEPS
    assert trained == again == [sorted(names) for names in trained]
    came = [
        names_of([each for each in facts.sampled if each["partition"] == "train"]) for facts in both
    ]
    for of_first, of_again, want in zip(*came, trained, strict=True):
        assert sorted(of_first) == sorted(of_again) == want
        assert of_first != of_again, (
            "they ended in the same order: nothing was asked of the trainer"
        )


OF_THE_PLAN = re.compile(r"^padding/|^global_seqlen/|^perf/total_num_tokens")
"""What the two plans are meant to differ in."""


def run_growing(folder, sharing, *overrides, model_kind="qwen2"):
    return run_job(
        folder,
        "+padding=prompt",
        "padding.packer=plan",
        f"padding.sharing={sharing}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=growing_context",
        "actor_rollout_ref.actor.use_kl_loss=true",
        # One optimizer step a batch: then all that a batch logs is of its first step.
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        *(f"+{role}.optim.{ADAM_EPS}" for role in ("actor_rollout_ref.actor", "critic")),
        "padding.weighting=session",
        "padding.advantages=session",
        *overrides,
        steps=STEPS,
        model_kind=model_kind,
    )


@pytest.mark.parametrize("estimator", ["gae", "grpo of a Qwen3.5"])
def test_rollouts_and_metrics_are_those_of_a_job_without_sharing(estimator, tmp_path):
    overrides = []
    kind = "qwen3_5" if estimator.endswith("Qwen3.5") else "qwen2"
    if estimator == "gae":
        # verl draws the head of a critic anew in each run where the model has none.
        value_model = make_value_model(make_tiny_model("qwen2", tmp_path), tmp_path / "critic")
        overrides = ["algorithm.adv_estimator=gae", f"critic.model.path={value_model}"]
    plain, shared = (
        run_growing(tmp_path / sharing, sharing, *overrides, model_kind=kind)
        for sharing in ("off", "on")
    )
    rows = rollouts(plain)
    assert sorted(rows) == [1, 2, 3]
    assert all(any(score > 0 for *_, score in of_step) for of_step in rows.values())
    for facts in (plain, shared):
        for step, metrics in facts.metrics.items():
            exact = ["actor/ppo_kl", "actor/pg_clipfrac", *(["actor/kl_loss"] if step == 1 else [])]
            assert {name: metrics[name] for name in exact} == dict.fromkeys(exact, 0.0), step
            assert metrics["actor/grad_norm"] > 0
            assert metrics["padding/session/rows/mean"] > 1.5
        assert facts.metrics[STEPS]["actor/kl_loss"] > 0
    assert rollouts(shared) == rows, "texts and rewards, row by row"
    assert_metrics_agree(shared, plain)
    for metrics in shared.metrics.values():
        factors = {
            name: value for name, value in metrics.items() if name.endswith("/sharing_factor")
        }
        assert len(factors) == (5 if estimator == "gae" else 3)
        assert min(factors.values()) > 1.2, "rows were meant to begin alike"


def assert_metrics_agree(
    facts,
    plain,
    *,
    among=(
        "critic/rewards/mean",
        "actor/entropy",
        "rollout_corr/training_log_ppl",
    ),
    absent=(),
):
    """At each step the same metrics, but for those that tell of the plan, and those ``absent``."""
    for step, want in plain.metrics.items():
        metrics = facts.metrics[step]
        compared = [
            name
            for name, value in want.items()
            if isinstance(value, float)
            and not MEASURED.search(name)
            and not OF_THE_PLAN.search(name)
        ]
        assert len(compared) > 30
        assert set(among) <= set(compared)
        assert set(compared) - set(metrics) == set(absent) & set(compared)
        for name in set(compared) - set(absent):
            np.testing.assert_allclose(
                metrics[name], want[name], rtol=1e-5, atol=1e-6, err_msg=f"step {step}: {name}"
            )
