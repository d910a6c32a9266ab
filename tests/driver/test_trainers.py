"""The trainer that a job gets: the padded one of its mode with a padding section, verl's without,
or none.

verl's constructors run whole: they end before the first worker starts.
"""

from contextlib import contextmanager
from pathlib import Path

import omegaconf
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import UnsupportedInterpolationType
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.support.trainer_without_workers import make_trainer
from tests.support.verl_config import DYNAMIC, SEPARATE, compose_job
from verl_padding import __version__
from verl_padding.driver.trainers import PADDED_TRAINERS
from verl_padding.entry import import_hooks
from verl_padding.errors import PaddingConfigError
from verl_padding.job.modes import MODES
from verl_padding.job.vendor import FOR_WORKERS, VENDOR
from verl_padding.plan import STRATEGIES

ONE_EACH = dict.fromkeys(("actor", "log_prob", "ref", "critic", "values"), 1)


def job(mode, *overrides, padding=None):
    """A config; with a section as a program may put it there, which no callback of Hydra's has
    seen."""
    config = compose_job(*DYNAMIC, *SEPARATE, f"trainer.v1.trainer_mode={mode}", *overrides)
    if padding is not None:
        OmegaConf.set_struct(config, False)
        config.padding = padding
        OmegaConf.update(config, FOR_WORKERS, VENDOR, force_add=True)
    return config


@contextmanager
def registered(base):
    """A trainer of one's own."""
    mine = register_trainer("mine")(type("Mine", (base,), {}))
    try:
        yield mine
    finally:
        del TRAINER_REGISTRY["mine"]


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_is_the_padded_one_of_the_mode(mode):
    verls, is_separate = get_trainer_cls(mode), mode == "separate_async"
    for config in (job(mode, "+padding=rows"), job(mode, padding={"strategy": "rows"})):
        trainer = verls(config=config)
        assert type(trainer) is PADDED_TRAINERS[verls]
        assert trainer._job.padding.strategy == "rows"
        assert trainer.parameter_sync_step == (4 if is_separate else 1)
        assert trainer._job.planner_job(dp_sizes=ONE_EACH).prompts == (16 if is_separate else 64)
        assert trainer.trainer_mode == config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_string_in_place_of_the_section_is_refused(mode):
    # What Hydra makes of +padding=prompt where it has not found the group.
    with pytest.raises(
        PaddingConfigError,
        match=r"^padding='prompt': not a mapping, so the config group was not found",
    ):
        get_trainer_cls(mode)(config=job(mode, padding="prompt"))


@pytest.mark.parametrize("mode", MODES)
def test_without_a_section_verls_trainers_are_verls(mode):
    trainer = make_trainer(job(mode))
    assert type(trainer) is get_trainer_cls(mode)
    assert type(trainer).__module__.startswith("verl.")


def test_a_trainer_of_ones_own_that_pads_nothing_is_refused_with_a_section():
    with registered(get_trainer_cls("sync")) as mine:
        with pytest.raises(
            PaddingConfigError, match=r"^padding: Mine is not a padded trainer .*PaddedTrainerSync"
        ):
            mine(config=job("mine", "+padding=prompt"))
        assert type(mine(config=job("mine"))) is mine
    with registered(PADDED_TRAINERS[get_trainer_cls("sync")]) as mine:
        assert type(mine(config=job("mine", "+padding=prompt"))) is mine
        with pytest.raises(PaddingConfigError, match=r"^padding=None: "):
            mine(config=job("mine"))


def test_a_job_of_the_groups_stops_in_a_process_without_the_plugin():
    # Where the trainer is made, that is: on whichever node Ray puts it. verl resolves the config
    # there first of all.
    groups = [
        path.stem for path in (Path(__file__).parents[2] / "configs" / "padding").glob("*.yaml")
    ]
    assert set(groups) == {*STRATEGIES, "fast"}
    for group in groups:
        config = compose_job(f"+padding={group}")
        assert config.padding.version == __version__
        sent = OmegaConf.create(OmegaConf.to_yaml(config))
        OmegaConf.clear_resolver("verl_padding.version")
        try:
            with pytest.raises(
                UnsupportedInterpolationType, match=r"interpolation type verl_padding\.version"
            ):
                OmegaConf.resolve(sent)
        finally:
            import_hooks._register_resolver(omegaconf)


def test_a_model_whose_vision_is_not_known_is_refused_before_any_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(
        PPOTrainer, "_init_tokenizer", lambda self: None
    )  # where verl fetches the model
    (tmp_path / "config.json").write_text('{"model_type": "mllama"}')
    trainers = [
        make_trainer(job("sync", "+padding=prompt", f"padding.multimodal={how}"))
        for how in ("auto", "empty")
    ]
    for trainer in trainers:
        trainer.config.actor_rollout_ref.model.path = str(tmp_path)
    with pytest.raises(
        PaddingConfigError, match=r"^padding.multimodal='auto': .* type 'mllama' .*=empty"
    ):
        trainers[0]._init_tokenizer()
    trainers[1]._init_tokenizer()
