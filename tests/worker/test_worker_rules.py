"""What only a worker shows of what is left out: whose loss its actor has, and what draws something
while it trains."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.workers.utils.losses import ppo_loss, sft_loss

from verl_padding.job.savings import OLD_LOG_PROBS, PACKER, ZERO_ADVANTAGE_ROWS
from verl_padding.worker.padded_engine import padded
from verl_padding.worker.worker_check import INCOMPATIBILITIES, find_incompatibilities

SKIP, UPDATE = ZERO_ADVANTAGE_ROWS, OLD_LOG_PROBS


def policy_loss(mode):
    return partial(ppo_loss, config=SimpleNamespace(policy_loss=SimpleNamespace(loss_mode=mode)))


VANILLA = policy_loss("vanilla")


class Engine:
    engine_config = SimpleNamespace(strategy="own")

    def __init__(self, module):
        self.module = module


class Trainee:
    """An actor's training worker."""

    def __init__(self, loss_fn=VANILLA, module=None):
        self.loss_fn = loss_fn
        self.engine = padded(Engine)(module or torch.nn.Linear(2, 2))


def blocked(saving, training_worker):
    """What of an actor's worker blocks a saving."""
    answer = find_incompatibilities([saving])(SimpleNamespace(actor=training_worker))
    (found,) = answer.non_tensor_batch[INCOMPATIBILITIES]
    assert {name for name, _ in found} <= {saving}
    return [str(incompatibility) for _, incompatibility in found]


@pytest.mark.parametrize("saving", [SKIP, UPDATE])
def test_a_loss_of_the_users_own_is_refused_in_the_worker_too(saving, monkeypatch):
    assert not blocked(saving, Trainee())
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(POLICY_LOSS_REGISTRY))
    register_policy_loss("later")(POLICY_LOSS_REGISTRY["vanilla"])
    not_known = (
        partial(own_loss),
        own_loss,
        partial(sft_loss),
        partial(ppo_loss, None),
        ppo_loss,
        policy_loss("later"),
    )
    for loss in not_known:
        assert blocked(saving, Trainee(loss))
    register_policy_loss("vanilla")(own_loss)
    (incompatibility,) = blocked(saving, Trainee())
    assert "own_loss" in incompatibility


def test_a_loss_with_a_gradient_in_zero_advantage_rows_is_refused():
    (incompatibility,) = blocked(SKIP, Trainee(policy_loss("dro")))
    assert "dro" in incompatibility
    assert not blocked(UPDATE, Trainee(policy_loss("dro")))


def own_loss(**_):
    raise NotImplementedError


@pytest.mark.parametrize(
    "rate", ["layerdrop", "drop_prob", "router_jitter_noise", "attention_dropout"]
)
def test_a_model_that_draws_while_it_trains_takes_no_own_log_probs(rate):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    assert not blocked(UPDATE, Trainee(module=module))
    setattr(module[0], rate, 0.5)
    (incompatibility,) = blocked(UPDATE, Trainee(module=module))
    assert f"{rate}=0.5" in incompatibility
    assert not blocked(SKIP, Trainee(module=module))


def test_nor_does_one_with_a_layer_of_dropout():
    (incompatibility,) = blocked(UPDATE, Trainee(module=torch.nn.Sequential(torch.nn.Dropout(0.1))))
    assert "0.p=0.1" in incompatibility


def test_the_plan_cuts_for_no_engine_that_cuts_in_another_way():
    cuts = type("Cuts", (Engine,), {"forward_backward_batch": json.dumps})
    engine = padded(cuts)(torch.nn.Linear(2, 2))
    answer = find_incompatibilities([PACKER])(SimpleNamespace(engine=engine))
    (((saving, incompatibility),),) = answer.non_tensor_batch[INCOMPATIBILITIES]
    assert (saving, incompatibility.setting) == (PACKER, "engine=Cuts")
