"""What a job is refused for, before it has a row."""

from dataclasses import replace

import pytest

from verl_padding.plan import Job, PlanError

JOB = Job(strategy="rows", prompts=1, sessions_per_prompt=1, updates={}, inference={})


def test_sharing_without_the_plans_packer_is_refused():
    with pytest.raises(PlanError, match=r"sharing='on' with padding.packer='verl'.*packer='plan'"):
        replace(JOB, sharing="on")
