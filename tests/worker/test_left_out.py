"""What only a worker shows of what is left out: whose loss its actor has, and what draws something
while it trains."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.workers.utils.losses import ppo_loss, sft_loss

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.worker.left_out import check_left_out

SKIP, UPDATE = (
    PaddingConfig(zero_advantage_rows="skip"),
    PaddingConfig(recompute_old_log_probs=False),
)


def policy_loss(mode: str) -> partial:
    return partial(ppo_loss, config=SimpleNamespace(policy_loss=SimpleNamespace(loss_mode=mode)))


VANILLA = policy_loss("vanilla")


class Trainee:
    """An actor's training worker."""

    def __init__(self, loss_fn=VANILLA, module=None):
        self.loss_fn = loss_fn
        self.engine = SimpleNamespace(module=module or torch.nn.Linear(2, 2))


def check(padding: PaddingConfig, training_worker: Trainee) -> None:
    check_left_out(padding)(SimpleNamespace(actor=training_worker))


@pytest.mark.parametrize("padding", [SKIP, UPDATE], ids=["idle rows", "old log-probs"])
def test_a_loss_of_the_users_own_is_refused_in_the_worker_too(padding, monkeypatch):
    check(padding, Trainee())
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
        with pytest.raises(PaddingConfigError, match="the actor's loss is"):
            check(padding, Trainee(loss))
    register_policy_loss("vanilla")(own_loss)
    with pytest.raises(PaddingConfigError, match="own_loss"):
        check(padding, Trainee())
    check(PaddingConfig(), Trainee())


def test_a_loss_with_a_gradient_in_idle_rows_is_refused():
    with pytest.raises(PaddingConfigError, match="dro"):
        check(SKIP, Trainee(policy_loss("dro")))
    check(UPDATE, Trainee(policy_loss("dro")))


def own_loss(**_):
    raise NotImplementedError


@pytest.mark.parametrize(
    "rate", ["layerdrop", "drop_prob", "router_jitter_noise", "attention_dropout"]
)
def test_a_model_that_draws_while_it_trains_takes_no_own_log_probs(rate):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    check(UPDATE, Trainee(module=module))
    setattr(module[0], rate, 0.5)
    with pytest.raises(PaddingConfigError, match=rf"{rate}=0\.5"):
        check(UPDATE, Trainee(module=module))
    check(SKIP, Trainee(module=module))


def test_nor_does_one_with_a_layer_of_dropout():
    with pytest.raises(PaddingConfigError, match=r"0\.p=0\.1"):
        check(UPDATE, Trainee(module=torch.nn.Sequential(torch.nn.Dropout(0.1))))
