"""The ``padding`` section: what it takes, and what it refuses, each refusal with the key, the value
and the choices."""

import pytest
from omegaconf import OmegaConf

from tests.support.verl_config import compose_job
from verl_padding.config import OLD_SHARING, REMOVED_SETTINGS, PaddingConfig
from verl_padding.errors import PaddingConfigError, PaddingError
from verl_padding.plan import STRATEGIES


def test_no_section_means_the_defaults():
    assert PaddingConfig.from_section(None) == PaddingConfig()


def test_a_section_of_hydra_is_read():
    section = OmegaConf.create(
        {"strategy": "lcm", "denominator": "nominal", "seed": 3, "pad_length": 8}
    )
    config = PaddingConfig.from_section(section)
    assert (config.strategy, config.denominator, config.seed, config.pad_length) == (
        "lcm",
        "nominal",
        3,
        8,
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"strategy": "prompts"},
            rf"^padding.strategy='prompts': .*Choices: {', '.join(STRATEGIES)}\.$",
        ),
        ({"denominator": 3}, r"^padding.denominator=3: "),
        ({"cost_model": "flops"}, r"^padding.cost_model='flops': .*, model\.$"),
        (
            {"cost_model": "measured"},
            r"^padding.cost_model='measured': .* Set padding.cost_model=model\.$",
        ),
        ({"pad_length": 1}, r"^padding.pad_length=1: "),
        ({"sharing": ["trees"]}, r"^padding.sharing=\['trees'\]: "),
        ({"seed": -1}, r"^padding.seed=-1: "),
        ({"seed": True}, r"^padding.seed=True: "),
        (
            {"stratgy": "rows"},
            r"^padding.stratgy='rows': .*Choices: strategy, optimizer_steps, denominator,",
        ),
        ("prompt", r"^padding='prompt': "),
    ],
)
def test_a_bad_section_is_refused_in_one_line(section, message):
    with pytest.raises(PaddingConfigError, match=message) as refusal:
        PaddingConfig.from_section(section)
    assert isinstance(refusal.value, PaddingError)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("old", OLD_SHARING)
def test_values_of_the_release_before_are_read_with_one_warning(old, caplog):
    padding = compose_job("+padding=prompt", f"padding.sharing={old}").padding
    assert PaddingConfig.from_section(padding).sharing == "on"
    assert caplog.text.count(f"padding.sharing={old} is read as on") == 1


@pytest.mark.parametrize("key", REMOVED_SETTINGS)
def test_settings_that_have_gone_change_nothing_and_say_so(key, caplog):
    assert (
        PaddingConfig.from_section(compose_job("+padding=prompt", f"padding.{key}=own").padding)
        == PaddingConfig()
    )
    assert caplog.text.count(f"padding.{key}=own is not read any more") == 1


def test_weights_in_the_critics_loss_are_refused():
    with pytest.raises(PaddingConfigError, match=r"^padding.weighted_losses='all': "):
        PaddingConfig.from_section({"weighted_losses": "all"})
