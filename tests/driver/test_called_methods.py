"""verl's own loop, on a trainer whose passes do nothing: where it calls another method in the place
of one that the plug-in overrides, the job is refused before it goes on."""

import inspect
import textwrap
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerSeparateAsync, trainer_base

from tests.support.verl_config import compose_job
from verl_padding.driver import mixin
from verl_padding.driver.called_methods import CalledMethods
from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.errors import PaddingConfigError
from verl_padding.job.verl_facts import OVERRIDDEN
from verl_padding.pads.prompt_order import PromptNames

LOCAL_UPDATES = 2
OVERRIDES = (
    *("trainer.val_before_train=false", "trainer.total_epochs=1", "trainer.logger=[]"),
    *("trainer.save_freq=2", "trainer.test_freq=-1", f"data.train_batch_size={LOCAL_UPDATES}"),
)


def passes_on(self, batch=None, *args, **kwargs):
    return batch


IDLE = {
    name: passes_on
    for name in vars(PPOTrainer)
    if name.startswith(("on_", "_compute_", "_update_", "_shutdown", "_reissue", "_start", "_stop"))
    or name in ("_balance_batch", "_init_tokenizer", "_save_checkpoint", "_submit_batch_to_rollout")
} | {
    "_build_replay_buffer": lambda self: SimpleNamespace(
        sample=lambda **_: (KVBatchMeta(keys=[], tags=[], partition_id="train"), {})
    ),
    "_fetch_one_gen_batch": lambda self: TensorDict({}, batch_size=1),
    "_consume_sync_metrics": lambda self: {},
}


def trainer_with(**own):
    """A padded trainer of verl's loop, whose other methods are idle, in front of these."""
    stock = type("IdleTrainer", (PPOTrainer,), IDLE | own)
    trainer = object.__new__(type("Trainer", (PaddedTrainer, stock), {}))
    trainer.config = compose_job(*OVERRIDES)
    trainer.parameter_sync_step, trainer.steps_per_epoch = LOCAL_UPDATES, 2
    trainer.total_training_steps, trainer.global_steps = 2, 0
    trainer.use_reference_policy, trainer.use_critic, trainer.trainer_mode = True, False, "sync"
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.replay_buffer = None
    trainer._prompt_names, trainer.called_methods = PromptNames(), CalledMethods(trainer)
    trainer._job, trainer.steps = MagicMock(), MagicMock()
    return trainer


def train(trainer, *set_up):
    for method in set_up:
        trainer.replay_buffer = getattr(trainer, method)() or trainer.replay_buffer
    trainer.fit(None)


SET_UP = ("_init_tokenizer", "_build_replay_buffer")


@pytest.fixture(autouse=True)
def no_files(monkeypatch):
    quiet = SimpleNamespace(log=lambda **_: None)
    for name in ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger"):
        monkeypatch.setattr(trainer_base, name, lambda **_: quiet)
    monkeypatch.setattr(trainer_base, "tq", SimpleNamespace(kv_clear=lambda **_: None))
    monkeypatch.setattr(mixin, "compute_advantages", lambda batch, *_: batch)


def renamed(method):
    """verl's caller of a method, changed, and the method by its other name."""
    caller, other = OVERRIDDEN[method], f"{method}_of_verl"
    source = textwrap.dedent(inspect.getsource(getattr(PPOTrainer, caller)))
    assert f"self.{method}(" in source
    made = {}
    exec(source.replace(f"self.{method}(", f"self.{other}("), vars(trainer_base) | {}, made)
    return {caller: made[caller], other: IDLE.get(method) or getattr(PPOTrainer, method)}


def test_a_step_in_which_verl_calls_all_methods_passes():
    trainer = trainer_with()
    train(trainer, *SET_UP)
    assert trainer.global_steps == 3, "two steps have been made"


@pytest.mark.parametrize("method", sorted(OVERRIDDEN.keys() - {"_setup", *SET_UP}))
def test_a_step_in_which_verl_calls_another_method_is_refused(method):
    trainer = trainer_with(**renamed(method))
    with pytest.raises(PaddingConfigError, match=rf"^verl==.*\b{method}\b") as refusal:
        train(trainer, *SET_UP)
    others = OVERRIDDEN.keys() - {method, "step"}
    assert not [name for name in others if f" {name} " in str(refusal.value)]
    late = ("_compute_metrics", "_save_checkpoint")
    assert trainer.global_steps == (2 if method in late else 1)


@pytest.mark.parametrize("method", SET_UP)
def test_a_set_up_without_one_of_its_methods_is_refused(method):
    trainer = trainer_with()
    trainer.replay_buffer = IDLE["_build_replay_buffer"](trainer)
    with pytest.raises(PaddingConfigError, match=method):
        train(trainer, *(name for name in SET_UP if name != method))


def test_metrics_that_do_not_come_after_the_last_step_are_refused():
    trainer = trainer_with(**renamed("_compute_metrics"))
    trainer.total_training_steps = 1
    with pytest.raises(PaddingConfigError, match="_compute_metrics"):
        train(trainer, *SET_UP)
    assert trainer.global_steps == 2


@pytest.mark.parametrize(
    ("settings", "attributes"),
    [
        ({"val_before_train": True, "val_only": True}, {}),
        ({}, {"global_steps": 2}),
        ({"save_freq": -1}, {}),
        ({"critic_warmup": 5}, {}),
        ({}, {"parameter_sync_step": 1}),
    ],
    ids=["validation", "ended before", "not saved", "critic alone", "one update"],
)
def test_a_run_that_calls_fewer_methods_by_its_settings_passes(settings, attributes):
    trainer = trainer_with(_validate=lambda self: {"accuracy": 1.0})
    trainer.config.trainer.update(settings)
    vars(trainer).update(attributes)
    train(trainer, *SET_UP)


def test_a_users_own_method_in_the_place_of_ours_need_not_be_called():
    trainer = trainer_with()
    own = {"_compute_advantage": passes_on, "prepare_step": lambda self: {}}
    trainer.__class__ = type("Own", (type(trainer),), own)
    train(trainer, *SET_UP)


def test_separate_async_comes_to_prompts_on_the_same_way():
    """Its own ``prepare_step`` calls that of the base."""
    assert "super().prepare_step()" in inspect.getsource(PPOTrainerSeparateAsync.prepare_step)
