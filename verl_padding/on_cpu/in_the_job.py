"""What a dry run changes of verl in the processes of its job, to say and to refuse what verl would
not."""

import os
from functools import wraps
from numbers import Real
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.on_cpu.scripted_replies import TEXTS

STEP_BEGINS = "verl_padding: the dry run's step begins"
"""Line in the output of a job whose workers are up."""
FUNCTION = "reward.custom_reward_function"


def announce_step(trainer_base: Any) -> None:
    """Has verl's trainer say when it goes from its start, which takes long, to its steps."""
    if TEXTS not in os.environ:
        return
    fit = trainer_base.PPOTrainer.fit

    @wraps(fit)
    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        print(STEP_BEGINS, flush=True)
        return fit(self, *args, **kwargs)

    trainer_base.PPOTrainer.fit = announced


def trust_models_as_the_job(reward_loop: Any) -> None:
    """verl's reward loop runs code that comes with a model, also where the job does not trust
    it."""
    if TEXTS not in os.environ:
        return
    load_tokenizers = reward_loop.RewardLoopWorker._init_reward_fn
    by_verl = reward_loop.hf_tokenizer

    @wraps(load_tokenizers)
    def trusting(self: Any) -> None:
        trust = {"trust_remote_code": self.config.actor_rollout_ref.model.trust_remote_code}
        reward_loop.hf_tokenizer = lambda path, **given: by_verl(path, **given | trust)
        load_tokenizers(self)

    reward_loop.RewardLoopWorker._init_reward_fn = trusting


def check_rewards(reward_loop: Any) -> None:
    """Refuses a reward that is no number: verl would end later, at a field that is missing."""
    if TEXTS not in os.environ:
        return
    compute_score = reward_loop.RewardLoopWorker.compute_score

    @wraps(compute_score)
    async def checked(self: Any, data: Any) -> dict[str, Any]:
        result: dict[str, Any] = await compute_score(self, data)
        reward = result["reward_score"]
        if not isinstance(reward, Real) and not hasattr(reward, "item"):
            function = self.config.reward.custom_reward_function
            named = f"{FUNCTION}.name={function.name}: this function of {function.path}"
            if not function.path:
                name = self.config.reward.reward_manager.name
                named = f"reward.reward_manager.name={name}: this reward manager"
            fix = "Return a number in all cases, or a dict whose score is one."
            raise PaddingDataError(f"{named} returned {reward!r} as a reward. {fix}")
        return result

    reward_loop.RewardLoopWorker.compute_score = checked
