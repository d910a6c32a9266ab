"""Which savings a job has with ``auto``: those that it could ask for, and no others."""

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

import verl_padding
from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.errors import Incompatibility, PaddingConfigError
from verl_padding.job import verl_check
from verl_padding.job.savings import OLD_LOG_PROBS, SAVINGS, SHARING, ZERO_ADVANTAGE_ROWS
from verl_padding.job.verl_facts import FACTS
from verl_padding.on_cpu.tiny_models import TinyModelKind, make_tiny_model

A, R, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, LOSS, V1 = "actor_rollout_ref.model", f"{A}.policy_loss", "trainer.v1"
CORRECTION, ESTIMATOR = "algorithm.rollout_correction", "algorithm.adv_estimator"
KL = f"{A}.use_kl_loss=true"
ONE_STEP = (
    *DYNAMIC,
    "data.train_batch_size=8",
    f"{A}.ppo_mini_batch_size=8",
    f"{R}.calculate_log_probs=false",
)
"""A job of GRPO that admits every saving."""
FIXED = (
    f"{A}.use_dynamic_bsz=false",
    f"{R}.log_prob_use_dynamic_bsz=false",
    f"{A}.ppo_micro_batch_size_per_gpu=4",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
)
FIXED_REF = (
    KL,
    f"{REF}.log_prob_use_dynamic_bsz=false",
    f"{REF}.log_prob_micro_batch_size_per_gpu=2",
)
MEGATRON, VEOMNI = ("model_engine=megatron",), ("model_engine=veomni",)
SEPARATE = (
    f"{V1}.trainer_mode=separate_async",
    f"{R}.nnodes=1",
    f"{V1}.separate_async.parameter_sync_step=1",
)
SEVERAL_UPDATES = (
    *SEPARATE[:2],
    f"{V1}.separate_async.parameter_sync_step=2",
    "data.train_batch_size=16",
)
DISTILLATION = ("distillation.enabled=true",)
BLOCKING = {
    "nothing": (),
    "own loss": (f"{LOSS}.loss_mode=own",),
    "own estimator": (f"{ESTIMATOR}=own",),
    "fixed sizes": FIXED,
    "fixed sizes of the reference": FIXED_REF,
    "no packing": (f"{MODEL}.use_remove_padding=false",),
    "megatron": MEGATRON,
    "veomni": VEOMNI,
    "verl's packer": ("padding.packer=verl",),
    "normalized weights": (
        f"{LOSS}.loss_mode=bypass_mode",
        f"+{LOSS}.rollout_correction.rollout_is_batch_normalize=true",
    ),
    "kl": (KL,),
    "entropy": (f"{A}.entropy_coeff=0.01",),
    "entropy metric": (f"{A}.calculate_entropy=true",),
    "distillation": DISTILLATION,
    "lcm": ("padding.strategy=lcm", f"{R}.n=2"),
    "configured steps": ("padding.optimizer_steps=configured",),
    "two steps": (f"{A}.ppo_mini_batch_size=4",),
    "two epochs": (f"{A}.ppo_epochs=2",),
    "two local updates": SEVERAL_UPDATES,
    "replayed routes": (*MEGATRON, f"{A}.megatron.router_replay.mode=R2"),
    "bypass": (f"{CORRECTION}.bypass_mode=true",),
    "weights of the rollout": (f"{CORRECTION}.rollout_is=token",),
    "rejection": (f"{CORRECTION}.rollout_rs=token_k1",),
    "log-probs of the rollout": (f"{R}.calculate_log_probs=true",),
    "kl in the reward": ("algorithm.use_kl_in_reward=true",),
    **{f"loss {name}": (f"{LOSS}.loss_mode={name}",) for name in sorted(POLICY_LOSS_REGISTRY)},
    **{f"by {name}": (f"{ESTIMATOR}={name}",) for name in sorted(map(str, ADV_ESTIMATOR_REGISTRY))},
}
"""Jobs that lack a saving, each for a reason of its own: all the settings that refuse one."""


@pytest.fixture(autouse=True)
def _own_functions(monkeypatch):
    def own(*args, **kwargs):
        raise NotImplementedError

    for registry in ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY"):
        monkeypatch.setattr(core_algos, registry, {**getattr(core_algos, registry), "own": own})


@pytest.fixture(scope="module", autouse=True)
def met():
    """File and line of each incompatibility that jobs of these tests have met."""
    found, init = set(), Incompatibility.__init__

    def noted(self, *args, **kwargs):
        frame = sys._getframe(1)
        found.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Incompatibility, "__init__", noted)
        yield found


@cache
def fast(*overrides):
    return check_job(compose_job("+padding=fast", *ONE_STEP, *overrides))


def is_admitted(name: str, *overrides: str) -> bool:
    """Whether a job that asks for a saving starts; a refusal for another reason is an error."""
    packer = "auto" if name != "packer" else "plan"
    asked = [f"padding.packer={packer}", f"padding.{name}={str(SAVINGS[name].on).lower()}"]
    job = compose_job("+padding=prompt", *ONE_STEP, *asked, *overrides)
    try:
        check_job(job)
    except PaddingConfigError as error:
        refusal = str(error)
    else:
        return True
    assert refusal.startswith(f"padding.{name}=")
    settings = [each.lstrip("+").partition("=")[0] for each in overrides]
    assert any(f"{each}=" in refusal for each in (f"{A}.strategy", *settings))
    return False


def assert_on_where_admitted(*overrides: str) -> None:
    job = fast(*overrides)
    for name in SAVINGS:
        if name == "packer" and "padding.packer=verl" in overrides:
            continue
        if name == "packer" and set(FIXED) <= set(overrides):
            assert not job.savings.is_on(name), "admitted, but there is nothing to cut"
            continue
        assert job.savings.is_on(name) == is_admitted(name, *overrides), (name, overrides)


@pytest.mark.parametrize("overrides", BLOCKING.values(), ids=BLOCKING.keys())
def test_auto_is_on_exactly_where_a_job_could_ask_for_it(overrides):
    assert_on_where_admitted(*overrides)


KINDS = {
    "verl's defaults": (
        (f"{A}.ppo_mini_batch_size=4", f"{R}.calculate_log_probs=true"),
        {OLD_LOG_PROBS: [f"{A}.ppo_mini_batch_size=4", f"{R}.calculate_log_probs=True"]},
    ),
    "lora": ((f"{MODEL}.lora_rank=4",), {}),
    "distillation": (
        DISTILLATION,
        {name: ["distillation.enabled=True"] for name in (ZERO_ADVANTAGE_ROWS, OLD_LOG_PROBS)},
    ),
    "qwen3_vl": ((), {}),
    "megatron that replays routes": (
        (*MEGATRON, f"{A}.megatron.router_replay.mode=R3"),
        {SHARING: [f"{A}.megatron.router_replay.mode=R3"]},
    ),
    "veomni": (VEOMNI, {}),
    "separate_async": (SEPARATE, {}),
}
"""Kind of job, or of its tiny model -> its overrides; and the savings that are off, each with the
settings that keep it off."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_of_a_job_names_what_is_on_and_what_keeps_the_rest_off(kind, tmp_path):
    overrides, off = KINDS[kind]
    if kind in get_args(TinyModelKind):
        overrides = (f"{MODEL}.path={make_tiny_model(kind, tmp_path)}",)
    job = fast(*overrides)
    for name, line in zip(SAVINGS, job.savings.lines(), strict=True):
        _, _, state = line.partition(": ")
        if name not in off:
            assert state.partition(", ")[0] == f"on (padding.{name}=auto)"
            continue
        assert [state[:5], *re.findall(r"\S+=\S+(?=: )", state)] == ["off: ", *off[name]]


def test_an_explicit_value_is_kept_and_shown():
    config = compose_job("+padding=fast", *ONE_STEP, "padding.sharing=off", "padding.packer=plan")
    before = config.copy()
    lines = check_job(config).savings.lines()
    assert config == before, "no setting is changed for a saving"
    assert lines[0].endswith(": on (padding.packer=plan)")
    assert ": off: padding.sharing=off. " in lines[1]


def test_these_jobs_meet_every_incompatibility_that_a_config_can_show(met, monkeypatch, tmp_path):
    package = Path(verl_padding.__file__).parent
    calls = {
        (path.name, node.lineno)
        for path in (package / "job").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Incompatibility"
    }
    for overrides in BLOCKING.values():
        fast(*overrides)
    rope = {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(rope))
    assert not fast(f"{MODEL}.path={tmp_path}").shares
    no_packer = {fact: "gone" for fact in FACTS if fact.needed_by == "padding.packer"}
    monkeypatch.setattr(verl_check, "missing_facts", lambda source: no_packer)
    assert not fast.__wrapped__().savings.is_on("packer")
    assert len(calls) >= 10, "no call is found"
    assert calls <= met, calls - met
