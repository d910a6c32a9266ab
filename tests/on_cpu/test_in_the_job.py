"""What a dry run says of verl's job from within."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_padding.errors import PaddingDataError
from verl_padding.on_cpu.in_the_job import check_rewards

FUNCTION = {"path": "/mine/reward.py", "name": "compute_score"}


def given(reward, function):
    """What a reward loop worker answers whose function has given a reward."""

    class Worker:
        config = OmegaConf.create(
            {"reward": {"custom_reward_function": function, "reward_manager": {"name": "naive"}}}
        )

        async def compute_score(self, data):
            return {"reward_score": reward}

    check_rewards(SimpleNamespace(RewardLoopWorker=Worker))
    return asyncio.run(Worker().compute_score(None))["reward_score"]


def test_a_reward_that_is_no_number_is_named_with_its_function():
    for reward in (1, 0.5, True, torch.tensor(0.5)):
        assert given(reward, FUNCTION) == reward
    for reward in (None, "1.0", [1.0]):
        with pytest.raises(PaddingDataError, match=r"compute_score: .*/mine/reward.py"):
            given(reward, FUNCTION)
        with pytest.raises(PaddingDataError, match="naive"):
            given(reward, {"path": None, "name": "compute_score"})
