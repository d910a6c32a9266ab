"""A padded trainer whose workers only say how many ranks they have."""

from types import SimpleNamespace

from verl.protocol import DataProto
from verl.trainer.ppo.v1 import get_trainer_cls

import verl_padding.driver.trainers  # noqa: F401  (registers them)
from tests.support.verl_config import compose_job
from verl_padding.driver.called_methods import CalledMethods
from verl_padding.driver.training_steps import TrainingSteps


class _NothingExpected(CalledMethods):
    """Of tests that call some of a step's methods alone."""

    def _require(self, period, *methods):
        pass


def make_trainer(config):
    """The trainer of a job as ``verl.trainer.main_ppo`` makes it; it has not started anything
    yet."""
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


def padded_trainer(*overrides, dp_size=2):
    """A padded_sync trainer after its set-up, without workers: 4 prompts a step, 2 a mini-batch, 2
    sessions each."""
    config = compose_job(
        "+padding=prompt",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "trainer.n_gpus_per_node=2",
        *overrides,
    )
    trainer = make_trainer(config)
    trainer._job.has_vision = trainer._job.has_images = False  # there is no model to ask
    trainer.global_steps, trainer.local_trigger_step = 7, 0
    trainer.ref_in_actor = False  # verl says so when it makes the workers
    trainer.tokenizer = SimpleNamespace(eos_token_id=3, pad_token_id=4)
    workers = SimpleNamespace(
        execute_with_func_generator=lambda function: DataProto(),
        _dispatch_info={mesh: [*range(dp_size)] for mesh in ("actor", "ref", "train")},
    )
    trainer.actor_rollout_wg = trainer.ref_policy_wg = trainer.critic_wg = workers
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    trainer.steps = TrainingSteps(trainer, trainer._job)
    trainer.called_methods = _NothingExpected(trainer)
    trainer.steps.has_probed = True  # there is no model whose rows could leak
    return trainer
