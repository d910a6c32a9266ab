"""Whether a run has learned: its goal, reached and held."""

import pytest

from benchmarks.runs import Goal, Learning

RISE = [0.02 * step for step in range(50)]
GOAL = Goal(reward=0.95, floor=0.9, steps=60)


@pytest.mark.parametrize(
    ("rewards", "learned", "reached", "lowest"),
    [
        ([*RISE, *[0.99] * 10], True, 49, 0.96),
        ([*RISE, *[0.99] * 20, 0.89, *[1.0] * 10], False, 49, 0.89),
        ([*RISE, *[0.96] * 4, *[0.94] * 10], False, 49, 0.94),
        ([0.5] * 60, False, None, None),
        ([0.5] * 59, None, None, None),
        ([1.0], True, 1, 1.0),
    ],
)
def test_a_run_has_learned_if_it_reached_its_goal_and_never_lost_it(
    rewards, learned, reached, lowest
):
    learning = Learning(rewards, GOAL)
    assert (learning.learned, learning.reached, learning.lowest) == (learned, reached, lowest)
