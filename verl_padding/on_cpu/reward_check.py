"""A reward that is no number ends a dry run where it is given."""

from functools import wraps
from numbers import Real
from typing import Any

from verl_padding.errors import PaddingDataError


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
