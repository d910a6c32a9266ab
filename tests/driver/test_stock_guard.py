"""A padding section beside one of verl's trainers makes the padded one; beside another that pads nothing, no job.

verl's constructors run whole: they end before the first worker starts.
"""

from contextlib import contextmanager

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.support.verl_config import DYNAMIC, SEPARATE, compose_job
from verl_padding.driver import stock_guard
from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.driver.trainers import PaddedTrainerSeparateAsync, padded_trainer
from verl_padding.errors import PaddingConfigError
from verl_padding.job.modes import STOCK_MODES


def job(*overrides, padding=None):
    """A config; with a section as a program may put it there, which no callback of Hydra's has seen."""
    config = compose_job(*DYNAMIC, *SEPARATE, *overrides)
    if padding is not None:
        OmegaConf.set_struct(config, False)
        config.padding = padding
    return config


@contextmanager
def registered_as(name, base):
    """A trainer of one's own."""
    mine = register_trainer(name)(type(name.title(), (base,), {}))
    try:
        yield mine
    finally:
        del TRAINER_REGISTRY[name]


@pytest.mark.parametrize("mode", STOCK_MODES)
def test_a_stock_trainer_with_a_padding_section_is_made_as_its_padded_counterpart(mode):
    config = job(f"trainer.v1.trainer_mode={mode}", padding={"strategy": "rows"})
    for trainer in (get_trainer_cls(mode)(config=config), get_trainer_cls(mode)(config)):
        assert type(trainer) is get_trainer_cls(f"padded_{mode}")
        assert trainer._padding.strategy == "rows"
        assert trainer.trainer_mode == config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("mode", STOCK_MODES)
def test_a_plain_string_in_place_of_the_section_is_refused(mode):
    # What Hydra makes of +padding=prompt where it has not found the group.
    with pytest.raises(
        PaddingConfigError, match=r"^padding='prompt': not a mapping, so the config group was not found"
    ):
        get_trainer_cls(mode)(config=job(f"trainer.v1.trainer_mode={mode}", padding="prompt"))


@pytest.mark.parametrize("mode", STOCK_MODES)
def test_without_a_section_verls_trainers_are_verls(mode):
    trainer = get_trainer_cls(mode)(config=job(f"trainer.v1.trainer_mode={mode}"))
    assert type(trainer) is get_trainer_cls(mode)
    assert type(trainer).__module__.startswith("verl.")


@pytest.mark.parametrize("mode", STOCK_MODES)
def test_where_the_padded_trainers_could_not_be_registered_a_section_is_refused(mode, monkeypatch):
    monkeypatch.setattr(stock_guard, "COUNTERPARTS", {})
    name = get_trainer_cls(mode).__name__
    with pytest.raises(PaddingConfigError, match=rf"^padding: {name} is not a padded trainer and would ignore it"):
        get_trainer_cls(mode)(config=job(f"trainer.v1.trainer_mode={mode}", "+padding=prompt"))


def test_a_trainer_of_ones_own_may_extend_the_mixin_and_verls_trainer():
    stock = get_trainer_cls("sync")
    with registered_as("mine", type("Own", (PaddedTrainer, stock), {"extends": "sync"})) as mine:
        assert type(mine(config=job("+padding=prompt", "trainer.v1.trainer_mode=mine"))) is mine


def test_a_trainer_of_ones_own_that_pads_nothing_is_refused_with_a_section_and_made_without():
    with registered_as("mine", get_trainer_cls("sync")) as mine:
        with pytest.raises(PaddingConfigError, match=r"^padding: Mine is not a padded trainer .*PaddedTrainerSync"):
            mine(config=job("+padding=prompt", "trainer.v1.trainer_mode=mine"))
        with pytest.raises(PaddingConfigError, match=r"^padding: Mine is not a padded trainer"):
            padded_trainer("mine")
        assert type(mine(config=job("trainer.v1.trainer_mode=mine"))) is mine


def test_a_padded_trainer_under_a_name_of_its_own_extends_the_mode_of_its_base():
    with registered_as("mine", PaddedTrainerSeparateAsync) as mine:
        assert padded_trainer("mine").extends == "separate_async"
        config = job("+padding=prompt", "trainer.v1.trainer_mode=mine")
        trainer = mine(config=config)
        assert type(trainer) is mine
        assert trainer.trainer_mode == config.trainer.v1.trainer_mode == "separate_async"


def test_a_model_whose_vision_is_not_known_is_refused_when_it_is_at_hand_and_before_any_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(PPOTrainer, "_init_tokenizer", lambda self: None)  # where verl fetches the model
    trainer = get_trainer_cls("sync")(config=job("+padding=prompt"))
    (tmp_path / "config.json").write_text('{"model_type": "mllama"}')
    trainer.config.actor_rollout_ref.model.path = str(tmp_path)
    with pytest.raises(PaddingConfigError, match=r"^padding.multimodal='auto': .* type 'mllama' must .*=empty"):
        trainer._init_tokenizer()
    trainer = get_trainer_cls("sync")(config=job("+padding=prompt", "padding.multimodal=empty"))
    trainer.config.actor_rollout_ref.model.path = str(tmp_path)
    trainer._init_tokenizer()
