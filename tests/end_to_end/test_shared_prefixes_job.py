"""A job whose rows extend each other, with shared prefixes and without: the same rollouts, rewards and metrics."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.jobs import JobFacts, run_job
from tests.end_to_end.probe import LOG_PROBS
from tests.end_to_end.test_runs_repeat import MEASURED, rollouts, row_name
from tests.support.fsdp2_workers import make_value_model
from tests.support.tolerance import ADAM_EPS, LOG_PROB_AGREEMENT
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 3
OF_THE_PLAN = re.compile(r"^padding/|^global_seqlen/|^perf/total_num_tokens")
"""What the two plans are meant to differ in."""


def run(folder: Path, sharing: str, *overrides: str) -> JobFacts:
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
    )


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_rollouts_and_metrics_are_those_of_a_job_without_sharing(estimator, tmp_path, monkeypatch):
    monkeypatch.setenv(LOG_PROBS, "1")
    overrides = []
    if estimator == "gae":
        # verl draws the head of a critic anew in each run where the model has none.
        value_model = make_value_model(make_tiny_model("qwen2", tmp_path), tmp_path / "critic")
        overrides = ["algorithm.adv_estimator=gae", f"critic.model.path={value_model}"]
    shared, plain = run(tmp_path / "shared", "chains", *overrides), run(tmp_path / "plain", "off", *overrides)
    rows = rollouts(plain)
    assert sorted(rows) == [1, 2, 3]
    assert rollouts(shared) == rows, "texts and rewards, row by row"
    assert all(any(score > 0 for *_, score in of_step) for of_step in rows.values())
    assert_log_probs_agree(shared, plain)
    for facts in (shared, plain):
        for step, metrics in facts.metrics.items():
            exact = ["actor/ppo_kl", "actor/pg_clipfrac", *(["actor/kl_loss"] if step == 1 else [])]
            assert {name: metrics[name] for name in exact} == dict.fromkeys(exact, 0.0), step
            assert metrics["actor/grad_norm"] > 0
            assert metrics["padding/session/rows/mean"] > 1.5
        assert facts.metrics[STEPS]["actor/kl_loss"] > 0
    for step, metrics in shared.metrics.items():
        factors = {name: value for name, value in metrics.items() if name.endswith("/sharing_factor")}
        assert len(factors) == (5 if overrides else 3)
        assert min(factors.values()) > 1.2, "rows were meant to extend each other"
        want = plain.metrics[step]
        compared = [
            name
            for name, value in want.items()
            if isinstance(value, float) and not MEASURED.search(name) and not OF_THE_PLAN.search(name)
        ]
        assert len(compared) > 30
        assert (
            {"critic/rewards/mean", "actor/entropy", "rollout_corr/training_log_ppl"} <= set(compared) <= set(metrics)
        )
        for name in compared:
            np.testing.assert_allclose(metrics[name], want[name], rtol=1e-5, atol=1e-6, err_msg=f"step {step}: {name}")


def assert_log_probs_agree(shared: JobFacts, plain: JobFacts) -> None:
    """Token by token, at each step."""
    got, want = (
        [dict(zip(map(row_name, note["keys"]), note["log_probs"], strict=True)) for note in facts.batches]
        for facts in (shared, plain)
    )
    assert len(got) == len(want) == STEPS
    for of_got, of_want in zip(got, want, strict=True):
        assert of_got.keys() == of_want.keys()
        for row, log_probs in of_want.items():
            np.testing.assert_allclose(of_got[row], log_probs, rtol=0, atol=LOG_PROB_AGREEMENT, err_msg=str(row))
