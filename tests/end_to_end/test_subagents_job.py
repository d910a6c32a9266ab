"""The recipe subagents as a whole job: rollout by transformers, and by the real vLLM (``pytest -m
vllm``).

vLLM is where recipes/subagents/install_vllm_cpu.sh has put it, in an environment of its own.
"""

import os
from importlib.util import find_spec
from unittest import mock

import pytest

from tests.support.pages import ROOT
from tests.support.tolerance import LOG_PROB_AGREEMENT
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.recipes.subagents import session_metrics
from verl_padding.recipes.subagents.job import tiny_job
from verl_padding.record.run_files import ROLLOUTS, dumps_in, read_metrics, read_step

STEPS = 3
VLLM = pytest.param(
    "cpu_vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(find_spec("vllm") is None, reason="takes vLLM for CPUs"),
    ],
)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("local", ["cpu", VLLM])
def test_lead_and_sub_agents_train_and_the_rollout_agrees_with_the_trainer(local, tmp_path):
    environment = {"VERL_USE_EXTERNAL_MODULES": session_metrics.__name__, "PYTHONPATH": str(ROOT)}
    with mock.patch.dict(os.environ, environment):
        code = run_local_job(
            [
                *tiny_job(tmp_path / "assets"),
                "+padding=prompt",
                "padding.weighting=session",
                "padding.advantages=session",
                f"trainer.v1.trainer_mode={session_metrics.TRAINER_NAME}",
                f"trainer.total_training_steps={STEPS}",
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                f"trainer.rollout_data_dir={tmp_path / ROLLOUTS}",
                f"hydra.run.dir={tmp_path / 'hydra'}",
            ],
            folder=tmp_path,
            local=local,
            timeout_s=1700,
        )
    log = (tmp_path / LOG).read_text()
    assert code == 0, log[-5000:]
    metrics = dict(read_metrics(tmp_path))
    assert sorted(metrics) == list(range(1, STEPS + 1))
    for rows in map(read_step, dumps_in(tmp_path / ROLLOUTS)):
        step = metrics[rows.step]
        assert (step["padding/real_rows/total"], rows.dumped_pads) == (rows.real, 0)
        assert step["padding/actor/optimizer_steps/total"] == 4
        assert step["subagents/rows_per_session"] == step["padding/session/rows/mean"] >= 1
        # From step 2 on it is of weights that the rollout was sent.
        assert step["training/rollout_probs_diff_max"] < LOG_PROB_AGREEMENT
    assert sum(step["padding/pad_rows/total"] for step in metrics.values()) > 0, "no pad was met"
    assert max(step["subagents/rows_per_session"] for step in metrics.values()) > 1, (
        "nobody asked a sub-agent"
    )
