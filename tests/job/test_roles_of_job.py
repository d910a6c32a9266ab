"""Which roles a job has: what verl's own functions say, without importing verl."""

import subprocess
import sys
import warnings
from itertools import product

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.job.roles_of_job import has_critic, has_reference


@pytest.mark.parametrize("estimator", sorted(map(str, ADV_ESTIMATOR_REGISTRY)))
@pytest.mark.parametrize("enable", ["null", "true", "false"])
def test_there_is_a_critic_where_verl_makes_one(estimator, enable):
    config = compose_job(*DYNAMIC, f"algorithm.adv_estimator={estimator}", f"critic.enable={enable}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, that there is no critic
        assert has_critic(config) == need_critic(config)


@pytest.mark.parametrize(("in_reward", "in_loss"), list(product(["true", "false"], repeat=2)))
def test_there_is_a_reference_where_verl_needs_one(in_reward, in_loss):
    config = compose_job(
        *DYNAMIC, f"algorithm.use_kl_in_reward={in_reward}", f"actor_rollout_ref.actor.use_kl_loss={in_loss}"
    )
    assert has_reference(config) == need_reference_policy(config)


def test_a_run_is_read_without_verl(tmp_path):
    config = compose_job(*DYNAMIC)
    path = tmp_path / "config.yaml"
    OmegaConf.save(config, path)
    code = (
        "import sys; from omegaconf import OmegaConf; import verl_padding.runs.curves; "
        "from verl_padding.stock.padding import StockRule; "
        f"StockRule.of_config(OmegaConf.load({str(path)!r})); "
        "print(sorted({'verl', 'torch', 'ray'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[0] == "[]"
