"""Every advantage estimator that verl registers, through verl's own method: pads in the queue change nothing.

verl's ``_compute_advantage`` runs twice on the same rows, before a pad is made and while pads wait in TransferQueue:
advantages, returns, rewards, the controller of the in-reward KL and the metrics must be the same to the last bit.
"""

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.v1 import PPOTrainer

from tests.equivalence.advantages_in_queue import put_scored_rows, without_and_with_pads
from tests.support.rows_in_queue import read_columns
from tests.support.trainer_without_workers import padded_trainer
from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.doctor.job import _plan
from verl_padding.driver.advantages import check_advantages_stay_with_rows
from verl_padding.entry.hydra_callback import CheckJobBeforeStart
from verl_padding.errors import PaddingConfigError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

CRITIC = ["critic.ppo_mini_batch_size=2"]
PF_PPO = ("pow", "max_min", "max_random")

VERLS_LIMITS = {
    "gdpo": "needs fields that the v1 trainer does not select",
    "optimal_token_baseline": "needs fields that the v1 trainer does not select",
    "remax": "needs reward_baselines, which the v1 trainer does not make",
    "tir_optimal_token_baseline": "needs fields that the v1 trainer does not select",
}
"""Estimators that fail in verl 0.9.1's v1 trainer without any pad."""


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_an_estimator_gives_with_pads_in_the_queue_what_it_gives_without(name):
    without, with_pads = without_and_with_pads(name, *(CRITIC if name == "gae" else []))
    assert with_pads == without
    assert (without.error is not None) == (name in VERLS_LIMITS), without.error
    assert without.kl_coefficient != 0.2, "the controller was meant to move"
    assert without.metrics
    if without.error is None:
        assert any(any(row) for row in without.rows["advantages"])


def verls_advantages(estimator, **switches):
    """What verl's own method puts under the keys of the rows; its generator is seeded, so draws repeat."""
    trainer = padded_trainer(f"algorithm.adv_estimator={estimator}", *(CRITIC if estimator == "gae" else []))
    trainer.config.algorithm.update(switches)
    batch = put_scored_rows()
    torch.manual_seed(0)
    PPOTrainer._compute_advantage(trainer, batch, {})
    (advantages,) = read_columns(batch, "advantages")
    return [row.tolist() for row in advantages]


@pytest.mark.parametrize(
    ("estimator", "method"),
    [
        *[("gae", method) for method in PF_PPO],
        *[(name, PF_PPO[0]) for name in sorted(set(ADV_ESTIMATOR_REGISTRY) - {"gae", *VERLS_LIMITS})],
    ],
)
def test_an_algorithm_is_refused_where_verl_gives_rows_the_advantages_of_other_rows(estimator, method):
    """pf_ppo draws among advantages that are there: unless a row got its own, it got another row's.

    Once verl keeps them together, gae is to be taken out of what this expects, and the refusal is gone by itself.
    """
    switches = {"use_pf_ppo": True, "pf_ppo": {"reweight_method": method, "weight_pow": 2.0}}
    keeps = verls_advantages(estimator, **switches) == verls_advantages(estimator)
    assert keeps == (estimator != "gae")
    config = compose_job("+padding=prompt", f"algorithm.adv_estimator={estimator}")
    check_advantages_stay_with_rows(config)
    config.algorithm.update(switches)
    before = torch.random.get_rng_state()
    if keeps:
        check_advantages_stay_with_rows(config)
    else:
        with pytest.raises(PaddingConfigError, match=r"^algorithm.use_pf_ppo=True: "):
            check_advantages_stay_with_rows(config)
    assert torch.equal(torch.random.get_rng_state(), before), "the job's own random numbers are as they were"


def test_such_a_job_is_refused_on_the_command_line_by_the_doctor_and_where_the_trainer_is_made():
    gae = ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", *CRITIC)
    job = compose_job("+padding=prompt", *DYNAMIC, *gae)
    message = r"algorithm\.use_pf_ppo=True: "
    with pytest.raises(SystemExit, match=message):
        CheckJobBeforeStart().on_job_start(job)
    with pytest.raises(PaddingConfigError, match=message):
        padded_trainer(*gae)
    (refused,) = [each for each in _plan(job) if each.verdict == "wrong"]
    assert refused.message.startswith("algorithm.use_pf_ppo=True: ")


def test_trying_an_algorithm_leaves_the_random_numbers_of_the_job_as_they_are():
    config = compose_job("+padding=prompt", "algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true")
    before = torch.random.get_rng_state()
    with pytest.raises(PaddingConfigError):
        check_advantages_stay_with_rows(config)
    assert torch.equal(torch.random.get_rng_state(), before)
