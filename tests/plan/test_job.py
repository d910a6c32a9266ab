"""What a job is refused for, before it has a row."""

from dataclasses import replace

import pytest

from verl_padding.plan import Job, PlanError, Update

JOB = Job(strategy="rows", prompts=1, sessions_per_prompt=1, updates={}, inference={})


def test_a_mini_batch_that_does_not_divide_the_prompts_is_refused():
    with pytest.raises(
        PlanError, match=r"prompts_per_mini_batch=5 of 'actor' does not divide prompts=12"
    ):
        replace(JOB, prompts=12, updates={"actor": Update(dp_size=1, prompts_per_mini_batch=5)})


@pytest.mark.parametrize("name", ["packer", "sharing", "strategy", "cost_model"])
def test_a_choice_that_there_is_not_is_refused_with_those_there_are(name):
    with pytest.raises(PlanError, match=rf"^{name}='auto': .*{getattr(JOB, name)}"):
        replace(JOB, **{name: "auto"})


def test_a_fixed_size_that_the_ranks_cannot_share_is_refused():
    updates = {"actor": Update(dp_size=2, prompts_per_mini_batch=3)}
    with pytest.raises(PlanError, match=r"strategy='lcm'.*= 3 rows, not a multiple of 2 "):
        replace(JOB, strategy="lcm", updates=updates)


def test_sharing_without_the_plans_packer_is_refused():
    with pytest.raises(PlanError, match=r"sharing='on' with packer='verl'.*packer='plan'"):
        replace(JOB, sharing="on")
