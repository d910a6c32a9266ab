"""A padding section beside a trainer that would ignore it ends the job before a worker starts."""

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls, register_trainer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from tests.verl_config import compose_job
from verl_padding.errors import PaddingConfigError
from verl_padding.hydra_callback import raise_to_padded
from verl_padding.trainer.trainers import PaddedTrainerSeparateAsync, extended_mode

DYNAMIC = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    "algorithm.adv_estimator=grpo",
)


SEPARATE = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)
"""What verl's own constructor of separate_async wants before it goes on."""


class ReachedError(Exception):
    """verl's own constructor goes on."""


@pytest.fixture(autouse=True)
def short_constructor(monkeypatch):
    """verl's constructor ends where it would start to work."""

    def stop(self):
        raise ReachedError

    monkeypatch.setattr(PPOTrainer, "_build_replay_buffer", stop)
    monkeypatch.setattr(PPOTrainer, "_init_tokenizer", stop, raising=False)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("padding", ["prompt", {"strategy": "prompt"}], ids=["a plain string", "a section"])
def test_a_stock_trainer_with_a_padding_section_is_refused(mode, padding):
    config = compose_job(*DYNAMIC, *SEPARATE)
    OmegaConf.set_struct(config, False)
    config.padding, config.trainer.v1.trainer_mode = padding, mode
    with pytest.raises(PaddingConfigError, match=rf"padding=.*trainer_mode='{mode}' is verl's own .*padded_{mode}"):
        get_trainer_cls(mode)(config=config)


@pytest.mark.parametrize("mode", ["sync", "padded_sync"])
def test_other_jobs_reach_verls_constructor(mode):
    config = compose_job(*DYNAMIC, f"trainer.v1.trainer_mode={mode}", *(["+padding=rows"] if "padded" in mode else []))
    config.trainer.v1.trainer_mode = mode
    with pytest.raises(ReachedError):
        get_trainer_cls(mode)(config=config)


def test_a_trainer_under_a_name_of_its_own_extends_the_mode_of_its_base():
    @register_trainer("mine")
    class Mine(PaddedTrainerSeparateAsync):
        pass

    try:
        assert extended_mode("mine") == "separate_async"
        config = compose_job(*DYNAMIC, *SEPARATE, "+padding=prompt", "trainer.v1.trainer_mode=mine")
        assert raise_to_padded(config) == "separate_async"
        assert config.trainer.v1.trainer_mode == "mine"
        with pytest.raises(ReachedError):
            Mine(config=config)
    finally:
        del TRAINER_REGISTRY["mine"]


def test_a_registered_trainer_that_pads_nothing_is_refused_by_name():
    with pytest.raises(PaddingConfigError, match=r"trainer_mode='sync': this trainer pads nothing"):
        extended_mode("sync")
    with pytest.raises(
        PaddingConfigError, match=r"trainer_mode='nobody': Unknown trainer .* VERL_USE_EXTERNAL_MODULES"
    ):
        extended_mode("nobody")
