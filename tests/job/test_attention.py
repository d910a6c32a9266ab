"""Models of a job attend by torch where flash-attn is not installed, and by what their config says
otherwise."""

import pytest
from omegaconf import OmegaConf

from tests.support.verl_config import compose_job
from verl_padding.job import attention
from verl_padding.job.attention import use_torch_attention

MODELS = [
    f"{section}.override_config.attn_implementation"
    for section in ("actor_rollout_ref.model", "critic.model")
]
GAE = "algorithm.adv_estimator=gae"


@pytest.fixture
def _installed(request, monkeypatch):
    packages = getattr(request, "param", ())
    monkeypatch.setattr(attention, "find_spec", lambda name: name in packages or None)


def attentions(*overrides):
    config = compose_job("trainer.device=cuda", *overrides)
    use_torch_attention(config)
    return [OmegaConf.select(config, name) for name in MODELS]


@pytest.mark.usefixtures("_installed")
def test_actor_and_critic_attend_by_torch_without_flash_attn(caplog):
    assert attentions(GAE) == ["sdpa", "sdpa"]
    assert [record.message.count("sdpa") for record in caplog.records] == [1, 1]


@pytest.mark.usefixtures("_installed")
def test_an_attention_that_a_user_has_chosen_stays():
    name = "+actor_rollout_ref.model.override_config.attn_implementation"
    assert attentions(GAE, f"{name}=eager") == ["eager", "sdpa"]
    assert attentions(GAE, f"{name}=flash_attention_3") == ["flash_attention_3", "sdpa"]
    assert attentions(GAE, f"{name}=flash_attention_2") == ["sdpa", "sdpa"]


@pytest.mark.parametrize("_installed", [["flash_attn"], ["kernels"]], indirect=True, ids=str)
@pytest.mark.usefixtures("_installed")
def test_flash_attn_is_used_where_it_is_or_can_be_fetched(caplog):
    assert attentions(GAE) == [None, None]
    assert caplog.records == []
