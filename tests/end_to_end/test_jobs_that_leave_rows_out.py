"""Jobs that leave out zero-advantage rows, or the pass that computes old log-probs, beside the same
jobs that compute them."""

import pytest
import torch

from tests.end_to_end.test_beside_stock import weights_in
from tests.end_to_end.test_runs_repeat import STEPS, assert_metrics_agree, rollouts
from tests.support.jobs import run_job
from tests.support.tolerance import ADAM_EPS
from verl_padding.job import metric_names

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

LOGGED_AS_OURS = ("actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")
"""Metrics of verl's that are logged under names of ours, or not at all, where rows and the pass are
left out."""


def run(folder, *overrides):
    return run_job(
        folder,
        "actor_rollout_ref.rollout.agent.default_agent_loop=growing_context_of_equal_prompts",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        f"+actor_rollout_ref.actor.optim.{ADAM_EPS}",
        *overrides,
        steps=STEPS,
    )


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_fast_job_trains_as_one_of_prompts_alone(mode, tmp_path):
    plain, fast = (
        run(
            tmp_path / flag,
            f"+padding={flag}",
            "padding.optimizer_steps=configured",
            f"trainer.v1.trainer_mode={mode}",
            # No prompts beside those of the step, so that time does not decide which end first.
            "trainer.v1.colocate_async.num_warmup_batches=0",
            "actor_rollout_ref.actor.ppo_mini_batch_size=6",
            f"trainer.default_local_dir={tmp_path / flag / 'checkpoints'}",
            f"trainer.save_freq={STEPS}",
        )
        for flag in ("prompt", "fast")
    )
    # The same texts and rewards at each step, which the weights of the steps before decide.
    assert sorted(rollouts(plain)) == [1, 2, 3]
    assert rollouts(fast) == rollouts(plain)
    among = ("actor/pg_loss", "actor/grad_norm", "actor/lr")
    assert_metrics_agree(fast, plain, among=among, absent=LOGGED_AS_OURS)
    for step, metrics in plain.metrics.items():
        assert 0.4 < fast.metrics[step]["padding/rows/zero_advantage/share"] < 1
        assert metrics["actor/grad_norm"] > 0
    weights, want = (weights_in(job.folder / "checkpoints", STEPS) for job in (fast, plain))
    assert weights.keys() == want.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, want[name], rtol=1e-5, atol=1e-5, msg=name)
    assert "savings:" in fast.log
    for metrics in fast.metrics.values():
        assert metrics["padding/saved/passes/total"] == 1
        assert min(metrics[name] for name in metric_names.SAVED_TOKENS) > 0
    computed, all_tokens = (
        sum(metrics[metric_names.ALL_COMPUTED_TOKENS] for metrics in facts.metrics.values())
        for facts in (fast, plain)
    )
    saved = sum(
        metrics[name] for metrics in fast.metrics.values() for name in metric_names.SAVED_TOKENS
    )
    assert computed + saved == all_tokens


def test_asynchronous_local_updates_leave_out_what_they_need_not(tmp_path):
    facts = run(
        tmp_path,
        "+padding=prompt",
        "padding.packer=plan",
        "padding.zero_advantage_rows=skip",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "padding.sharing=on",
    )
    assert sorted(facts.metrics) == [1, 2, 3]
    for metrics in facts.metrics.values():
        assert 0.2 < metrics["padding/rows/zero_advantage/share"] < 1
        assert metrics["padding/actor/optimizer_steps/total"] == 2
        assert metrics["actor/grad_norm"] > 0
        assert ("actor/ppo_kl" in metrics, "actor/ppo_kl_computed" in metrics) == (False, True)
