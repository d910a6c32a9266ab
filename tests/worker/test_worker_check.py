"""Engines that follow no plan, and verl's losses as a later verl might read a mini-batch; and what
only a worker shows of what is left out: whose loss its actor has, and what draws something while it
trains."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.workers.utils import losses
from verl.workers.utils.losses import ppo_loss, sft_loss

from tests.support.loss_comparisons import POLICY_LOSSES
from tests.support.losses_on_rows import MODES, critic_loss, policy_loss
from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.job.savings import OLD_LOG_PROBS, PACKER, ZERO_ADVANTAGE_ROWS
from verl_padding.job.vendor import VARIABLE, VENDOR
from verl_padding.worker import worker_check
from verl_padding.worker.padded_engine import padded
from verl_padding.worker.worker_check import (
    INCOMPATIBILITIES,
    check_in_worker,
    check_loss_scaling,
    check_megatron,
    find_incompatibilities,
)


@pytest.mark.parametrize("mode", MODES)
def test_each_loss_of_verls_is_scaled_by_its_mini_batch(mode):
    check_loss_scaling("critic", critic_loss(mode))
    for name in POLICY_LOSSES:
        check_loss_scaling("actor", policy_loss(mode, name))


READ_BY = {"token-mean": "batch_num_tokens", "seq-mean-token-mean": "global_batch_size"}


@pytest.mark.parametrize("mode", READ_BY)
@pytest.mark.parametrize("loss", [policy_loss, critic_loss])
@pytest.mark.parametrize("renamed", ["dp_size", "of the mode"])
def test_a_loss_that_reads_another_name_is_refused(mode, loss, renamed, monkeypatch):
    name = READ_BY[mode] if renamed == "of the mode" else renamed
    made = loss(mode)

    def reads_another(config, model_output, data, dp_group=None):
        # What it finds under a name that nothing writes.
        tu.assign_non_tensor(data, **{name: 1})
        return made.func(config, model_output, data, dp_group)

    monkeypatch.setattr(worker_check, made.func.__name__, reads_another)
    with pytest.raises(PaddingError, match=rf"{name}="):
        check_loss_scaling("actor", partial(reads_another, **made.keywords))


def test_a_loss_of_a_users_own_is_its_users(monkeypatch):
    check_loss_scaling("actor", partial(losses.sft_loss, config=None))
    check_loss_scaling("actor", print)

    def no_number(**given):
        return given["log_prob"].sum() * float("nan"), {}

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "vanilla", no_number)
    check_loss_scaling("actor", policy_loss("token-mean", "vanilla"))


@pytest.mark.parametrize(
    ("vendor", "setting"), [(None, VARIABLE), ("nvidia", VARIABLE), (VENDOR, "strategy=own")]
)
def test_an_engine_that_follows_no_plan_is_refused_by_name(vendor, setting, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if vendor:
        monkeypatch.setenv(VARIABLE, vendor)
    engine = type("Engine", (), {"engine_config": SimpleNamespace(strategy="own")})()
    with pytest.raises(PaddingConfigError, match=rf"^{setting}.*\bEngine\b"):
        check_in_worker(SimpleNamespace(engine=engine))


OF_MEGATRON = {
    "moe_expert_capacity_factor": None,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 1e-3,
    "moe_z_loss_coeff": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
    "mtp_num_layers": 1,
}
"""As verl's bridges set them, some with what a model's config says."""


def check(role="actor", trains_mtp=False, **settings):
    engine = SimpleNamespace(tf_config=SimpleNamespace(**OF_MEGATRON | settings))
    model = SimpleNamespace(mtp=SimpleNamespace(enable_train=trains_mtp))
    check_megatron(role, SimpleNamespace(engine=engine, model_config=model))


def test_what_megatron_has_by_verl_counts_no_pads():
    check()
    check(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.0)
    check(moe_router_load_balancing_type=["aux_loss", "none"], moe_aux_loss_coeff=[0.0, 0.0])
    check(moe_expert_capacity_factor=-1, moe_z_loss_coeff=0.0)
    check(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0)
    check(trains_mtp=True, mtp_num_layers=None)
    check_megatron("actor", SimpleNamespace(engine=SimpleNamespace()))  # of FSDP


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("moe_router_load_balancing_type", {"moe_router_load_balancing_type": "aux_loss"}),
        (
            "moe_router_load_balancing_type",
            {
                "moe_router_load_balancing_type": ["seq_aux_loss", "sinkhorn"],
                "moe_aux_loss_coeff": [0.0, 0.0],
            },
        ),
        ("moe_z_loss_coeff", {"moe_z_loss_coeff": 1e-3}),
        ("moe_router_bias_update_rate", {"moe_router_enable_expert_bias": True}),
        ("mtp_num_layers", {"trains_mtp": True}),
    ],
)
def test_what_learns_from_all_tokens_is_refused_but_in_a_reference(name, settings):
    for role in ("actor", "critic"):
        with pytest.raises(PaddingConfigError, match=rf"\.{name}="):
            check(role, **settings)
    check("ref", **settings)


@pytest.mark.parametrize("role", ["actor", "ref", "critic"])
def test_places_at_experts_that_pads_would_take_are_refused(role):
    with pytest.raises(PaddingConfigError, match=r"moe_expert_capacity_factor=1\.5"):
        check(role, moe_expert_capacity_factor=1.5)


SKIP, UPDATE = ZERO_ADVANTAGE_ROWS, OLD_LOG_PROBS


def ppo_loss_of(mode):
    return partial(ppo_loss, config=SimpleNamespace(policy_loss=SimpleNamespace(loss_mode=mode)))


VANILLA = ppo_loss_of("vanilla")


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
        ppo_loss_of("later"),
    )
    for loss in not_known:
        assert blocked(saving, Trainee(loss))
    register_policy_loss("vanilla")(own_loss)
    (incompatibility,) = blocked(saving, Trainee())
    assert "own_loss" in incompatibility


def test_a_loss_with_a_gradient_in_zero_advantage_rows_is_refused():
    (incompatibility,) = blocked(SKIP, Trainee(ppo_loss_of("dro")))
    assert "dro" in incompatibility
    assert not blocked(UPDATE, Trainee(ppo_loss_of("dro")))


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
