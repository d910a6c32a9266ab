"""On Megatron, what keeps rows that branch from sharing is known before the job, and said."""

import json

import pytest

from tests.support.verl_config import compose_padded
from verl_padding.driver.job_check import check_job
from verl_padding.job.megatron_branches import BRANCH_WITH, branch_limit
from verl_padding.job.savings import SHARING
from verl_padding.on_cpu.tiny_models import make_tiny_model

OVERRIDE = "+actor_rollout_ref.actor.megatron.override_transformer_config"
MODEL = "actor_rollout_ref.model.path"


def limit_of(folder, *overrides):
    """Whether rows share, and what is said of those that branch."""
    shares = ("padding.packer=plan", "padding.sharing=auto")
    engine = ("model_engine=megatron", f"{MODEL}={folder}")
    job = check_job(compose_padded(*shares, *engine, *overrides))
    assert job.may_branch == (SHARING not in job.savings.limits)
    return job.shares, job.savings.limits.get(SHARING, "")


@pytest.mark.parametrize(
    "setting", ["softmax_type=learnable", "qk_clip=true", "fp8_multi_head_attention=true"]
)
def test_a_setting_that_attention_would_not_follow_is_named(setting, tmp_path):
    name, _, value = setting.partition("=")
    shares, limit = limit_of(make_tiny_model("qwen2", tmp_path), f"{OVERRIDE}.{setting}")
    assert shares
    assert f"{name}={value.replace('true', 'True')}" in limit


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_model_of_ordinary_attention_has_no_limit(kind, tmp_path):
    assert limit_of(make_tiny_model(kind, tmp_path)) == (True, "")


@pytest.mark.parametrize("changed", [{"kv_lora_rank": 8}, {"vision_config": {"depth": 1}}])
def test_models_of_other_attention_or_positions_have_one(changed, tmp_path):
    model = make_tiny_model("qwen2", tmp_path)
    config = json.loads((model / "config.json").read_text()) | changed
    assert branch_limit({}, config)


def test_of_all_settings_one_that_is_missing_is_a_limit():
    known = {name: admitted[0] for name, admitted in BRANCH_WITH.items()}
    assert branch_limit(known, complete=True) is None
    for name in known:
        others = {other: value for other, value in known.items() if other != name}
        assert name in (branch_limit(others, complete=True) or "")


def test_what_a_setting_admits_is_no_limit():
    assert branch_limit({}) is None
    for name, admitted in BRANCH_WITH.items():
        assert all(branch_limit({name: value}) is None for value in admitted)
        assert name in (branch_limit({name: "another"}) or "")
