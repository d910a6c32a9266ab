"""The plug-in beside stock verl: with the flag off nothing changes, and each resumes the other's
checkpoints."""

import pytest
import torch

from tests.support.agent import rows_of_step
from tests.support.jobs import ACTOR, run_job
from tests.support.tolerance import ADAM_EPS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
CHANGES_EVERY_TIME = ("timing", "perf/", "actor/perf/", "critic/perf/", "global_seqlen/")
"""Metrics of seconds and memory; and of how verl deals rows to ranks, which follows the order that
sessions end in."""
FLOAT32 = 1e-5


def few_rows(folder):
    """Rows and rewards of drawn numbers: two jobs have the same ones, whatever the model.

    They are fewer than a mini-batch holds: in which of several a row lands would follow the order
    that sessions end in.
    """
    return [
        "actor_rollout_ref.rollout.agent.default_agent_loop=few_rows",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        f"+actor_rollout_ref.actor.optim.{ADAM_EPS}",
        "data.train_batch_size=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=10",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.default_local_dir={folder}",
    ]


def weights_in(folder, step):
    """Parameters of both ranks' shards, by rank and name."""
    weights = {}
    for rank in range(2):
        shard = folder / f"global_step_{step}" / "actor" / f"model_world_size_2_rank_{rank}.pt"
        for name, tensor in torch.load(shard, weights_only=False).items():
            weights[f"{rank} {name}"] = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A stock job with the plug-in installed and one without it: what they did, their weights and
    checkpoints."""
    found = []
    for plugin in (True, False):
        folder = tmp_path_factory.mktemp("with" if plugin else "without")
        checkpoints = folder / "checkpoints"
        overrides = [*few_rows(checkpoints), f"trainer.save_freq={STEPS}"]
        facts = run_job(folder, *overrides, steps=STEPS, plugin=plugin)
        found.append((facts, weights_in(checkpoints, STEPS), checkpoints))
    return found


def test_with_the_flag_off_the_weights_are_those_without_the_plugin(runs):
    (_, ours, _), (_, theirs, _) = runs
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=FLOAT32, atol=FLOAT32, msg=name)


def test_so_are_the_metrics_the_optimizer_steps_and_the_log(runs):
    (ours, *_), (theirs, *_) = runs
    assert sorted(ours.metrics) == sorted(theirs.metrics) == list(range(1, STEPS + 1))
    compared = 0
    for step, metrics in ours.metrics.items():
        assert metrics.keys() == theirs.metrics[step].keys()
        for name, value in metrics.items():
            if not name.startswith(CHANGES_EVERY_TIME):
                assert value == pytest.approx(
                    theirs.metrics[step][name], rel=FLOAT32, abs=FLOAT32
                ), name
                compared += 1
    assert compared > 40 * STEPS
    assert not [
        name for metrics in ours.metrics.values() for name in metrics if name.startswith("padding/")
    ]
    assert ours.optimizer_steps == theirs.optimizer_steps
    assert [rows.real for rows in ours.rows.values()] == [
        rows_of_step(step) for step in range(1, STEPS + 1)
    ]
    assert max(rows.dumped_pads for rows in ours.rows.values()) > 0, "stock verl was meant to pad"
    assert "verl_padding:" not in ours.log


def test_a_padded_run_resumes_a_stock_checkpoint_and_a_stock_run_ours(runs, tmp_path):
    stock, before, checkpoints = runs[0]
    common = [*few_rows(checkpoints), "trainer.resume_mode=auto", f"trainer.save_freq={STEPS}"]
    ours = run_job(tmp_path / "2 ours", *common, "+padding=prompt", steps=2 * STEPS)
    between = weights_in(checkpoints, 2 * STEPS)
    again = run_job(tmp_path / "3 stock again", *common, steps=3 * STEPS)
    after = weights_in(checkpoints, 3 * STEPS)
    every = list(range(1, 3 * STEPS + 1))
    assert [sorted(run.metrics) for run in (stock, ours, again)] == [
        every[:3],
        every[3:6],
        every[6:],
    ]
    for earlier, later in ((before, between), (between, after)):
        assert earlier.keys() == later.keys()
        assert any(not torch.equal(weight, later[name]) for name, weight in earlier.items())
    for run, pads_are_dumped in ((stock, True), (ours, False), (again, True)):
        assert any(rows.dumped_pads for rows in run.rows.values()) == pads_are_dumped
        assert all(step.moved for step in run.optimizer_steps[ACTOR])
