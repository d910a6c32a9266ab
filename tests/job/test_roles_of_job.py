"""Which roles a job has: what verl's own functions say, without importing verl."""

import subprocess
import sys
import warnings
from itertools import product

from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.job.role_engine import has_critic, has_reference


def test_a_critic_and_a_reference_are_where_verl_needs_them():
    config = compose_job(*DYNAMIC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, that there is no critic
        for estimator, enable in product(map(str, ADV_ESTIMATOR_REGISTRY), (None, True, False)):
            config.algorithm.adv_estimator, config.critic.enable = estimator, enable
            assert has_critic(config) == need_critic(config)
    for in_reward, in_loss in product([True, False], repeat=2):
        config.algorithm.use_kl_in_reward, config.actor_rollout_ref.actor.use_kl_loss = in_reward, in_loss
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
