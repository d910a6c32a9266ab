"""What a dry run changes in verl's reward loop, to refuse what verl would not."""

from functools import wraps
from numbers import Real
from typing import Any

from verl_padding.errors import PaddingDataError


def trust_models_as_the_job(reward_loop: Any) -> None:
    """verl's reward loop runs code that comes with a model, also where the job does not trust
    it."""
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
    compute_score = reward_loop.RewardLoopWorker.compute_score

    @wraps(compute_score)
    async def checked(self: Any, data: Any) -> dict[str, Any]:
        result: dict[str, Any] = await compute_score(self, data)
        reward = result["reward_score"]
        if not isinstance(reward, Real) and not hasattr(reward, "item"):
            settings = self.config.reward
            function, manager = settings.custom_reward_function, settings.reward_manager.name
            raise PaddingDataError(
                f"reward.custom_reward_function.name={function.name}: {function.path}, by the "
                f"reward manager {manager!r}, returned {reward!r} as a reward. Return a number in "
                "all cases, or a dict whose score is one."
            )
        return result

    reward_loop.RewardLoopWorker.compute_score = checked
