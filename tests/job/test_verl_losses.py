"""Of verl's losses and estimators, each that verl registers is known, and no other."""

from inspect import signature

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.ray_trainer import compute_advantage

from tests.equivalence.test_estimators_beside_pads import CRITIC, VERLS_LIMITS
from tests.support.verl_config import compose_job
from verl_padding.driver.advantages import estimate
from verl_padding.errors import PaddingConfigError
from verl_padding.job.verl_losses import (
    ESTIMATOR,
    ESTIMATORS,
    GROUPING,
    LOSS_MODE,
    OF_TWO_SAMPLES,
    POLICY_LOSSES,
    WHITENING,
    check_names,
    verls_own,
)


def test_each_loss_and_estimator_that_verl_registers_is_known():
    """Their properties are computed by tests/equivalence."""
    for table, registry in (
        (POLICY_LOSSES, POLICY_LOSS_REGISTRY),
        (ESTIMATORS, ADV_ESTIMATOR_REGISTRY),
    ):
        registered = [
            str(name) for name, each in registry.items() if each.__module__.startswith("verl.")
        ]
        assert sorted(table) == sorted(registered)
        assert verls_own(list(table), registry) == list(table)
        assert verls_own(list(table), dict.fromkeys(table, one_of_a_users_own)) == []


def test_an_estimator_that_groups_reads_which_prompt_a_sample_is_of():
    for name in ESTIMATORS:
        assert (name in GROUPING) == ("index" in signature(ADV_ESTIMATOR_REGISTRY[name]).parameters)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - VERLS_LIMITS.keys()))
def test_an_estimator_raises_on_the_few_samples_that_are_named(name):
    def raises(mask):
        masks = torch.tensor(mask)
        fields = {"response_mask": masks, "values": masks * 0.5, "token_level_rewards": masks * 1.0}
        samples = DataProto.from_single_dict(fields)
        samples.non_tensor_batch["uid"] = np.array(["p"] * len(mask), dtype=object)
        rows, keys = TensorDict(fields, batch_size=len(mask)), ["p_0_0", "p_1_0"][: len(mask)]
        algorithm = compose_job(f"algorithm.adv_estimator={name}", *CRITIC.get(name, [])).algorithm
        estimated = estimate(rows, keys, algorithm)
        assert estimated["advantages"].isfinite().all()
        try:
            found = compute_advantage(
                samples,
                adv_estimator=name,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                config=algorithm,
            ).batch
        except ValueError:
            return True
        assert torch.equal(estimated["advantages"], found["advantages"])
        return False

    assert raises([[1, 0], [0, 0]]) == (name in WHITENING)
    assert raises([[1, 1]]) == (name in OF_TWO_SAMPLES)
    assert not raises([[1, 1], [1, 0]])


def test_one_of_verls_that_is_not_known_is_refused_and_a_users_own_is_not(monkeypatch):
    for setting, registry in (
        (LOSS_MODE, POLICY_LOSS_REGISTRY),
        (ESTIMATOR, ADV_ESTIMATOR_REGISTRY),
    ):
        monkeypatch.setitem(registry, "new", one_of_a_users_own)
        config = compose_job(f"{setting}=new")
        check_names(config)
        monkeypatch.setattr(one_of_a_users_own, "__module__", "verl.trainer.ppo.core_algos")
        with pytest.raises(PaddingConfigError, match=f"^{setting}=new: "):
            check_names(config)
        monkeypatch.undo()


def one_of_a_users_own():
    raise NotImplementedError
