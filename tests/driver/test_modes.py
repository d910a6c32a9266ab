"""A job has the mode that its user chose, and verl finds what it looks up by the mode's name."""

import logging
from inspect import getsource

import omegaconf
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import UnsupportedInterpolationType
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, get_trainer_cls

from tests.support.verl_config import DYNAMIC, SEPARATE, compose_job
from verl_padding import __version__
from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.entry import import_hooks
from verl_padding.job.modes import STOCK_MODES
from verl_padding.plan import STRATEGIES

NAMES = [*STOCK_MODES, *(f"padded_{mode}" for mode in STOCK_MODES)]


def as_the_task_runner(config):
    """The trainer that ``verl.trainer.main_ppo`` makes of a config, up to its first worker."""
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_is_the_padded_one_of_the_mode(name):
    config = compose_job(*DYNAMIC, *SEPARATE, "+padding=prompt", f"trainer.v1.trainer_mode={name}")
    mode = name.removeprefix("padded_")
    trainer = as_the_task_runner(config)
    assert type(trainer) is get_trainer_cls(f"padded_{mode}")
    assert trainer._padding.strategy == "prompt"
    assert trainer.parameter_sync_step == (4 if mode == "separate_async" else 1)
    assert trainer._job_reader.step_job(dp_sizes=ONE_EACH, updates_actor=True, seed=0).prompts == (
        16 if mode == "separate_async" else 64
    )
    assert trainer.config.trainer.v1.trainer_mode == mode


ONE_EACH = dict.fromkeys(("actor", "log_prob", "ref", "critic", "values"), 1)


def test_a_job_of_the_groups_stops_in_a_process_without_the_plugin():
    # Where the trainer is made, that is: on whichever node Ray puts it. verl resolves the config there first of all.
    for group in STRATEGIES:
        config = compose_job(f"+padding={group}")
        assert config.padding.version == __version__
        sent = OmegaConf.create(OmegaConf.to_yaml(config))
        OmegaConf.clear_resolver("verl_padding.version")
        try:
            with pytest.raises(UnsupportedInterpolationType, match=r"interpolation type verl_padding\.version"):
                OmegaConf.resolve(sent)
        finally:
            import_hooks._register_resolver(omegaconf)


def test_a_line_of_verls_log_that_python_refuses_is_not_written_where_no_replica_shares_the_trainers_devices(
    monkeypatch,
):
    log = logging.getLogger(PPOTrainerSeparateAsync.__module__)
    assert "flush=True" in getsource(PPOTrainerSeparateAsync._setup), (
        "verl has mended it: PaddedTrainerSeparateAsync._setup and the doctor's line can go"
    )
    monkeypatch.setattr(log, "level", log.level)  # given back at the end
    log.setLevel(logging.INFO)
    config = compose_job(*DYNAMIC, *SEPARATE, "+padding=prompt", "trainer.v1.trainer_mode=separate_async")
    config.actor_rollout_ref.hybrid_engine = False
    trainer = as_the_task_runner(config)
    monkeypatch.setattr(PaddedTrainer, "_setup", lambda self: log.info("one line", flush=True))
    trainer._setup()
    assert log.level == logging.WARNING
