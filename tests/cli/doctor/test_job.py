"""What keeps a job from starting, or from doing what is meant, each named with its setting."""

import pytest

from tests.support.doctored_job import LOOP, LOOPS, MODEL, REWARD, ROLLOUT, SAMPLER, A, mistakes
from verl_padding.cli.doctor.finding import run_check
from verl_padding.cli.doctor.job import check_job_of
from verl_padding.job.composition import JobArguments


@mistakes(
    ({MODEL: "empty"}, "empty"),
    ({f"{A}.loss_agg_mode": "token-meen"}, "token-meen", "verl"),
    ({"actor_rollout_ref.rollout.m": 4}, "'m'", "verl"),
    ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, "3"),
    ({"trainer.n_gpus_per_node": 0}, "0", f"{ROLLOUT}.tensor_model_parallel_size"),
)
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, assert_named):
    assert_named(changes, subject, words)


def test_a_job_without_a_mistake_is_found_to_have_none(found):
    changes = {LOOPS: "agent.yaml", LOOP: "mine", f"{REWARD}.path": "code_of_mine.py"}
    named = {f"{REWARD}.name": "compute_score", f"{SAMPLER}.path": "pkg://code_of_mine"}
    assert found({}) == {}
    assert found(changes | named | {f"{SAMPLER}.name": "Mine"}) == {}


def findings(*overrides):
    """On a padded job: subject -> (verdict, message)."""
    job = JobArguments(overrides=(*overrides, "+padding=prompt"))
    found = run_check("job", check_job_of(job))
    return {each.subject: (each.verdict, each.message) for each in found}


WRONG = (
    "padding.strategy=promt",
    "trainer.v1.trainer_mode=synk",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "~data.max_prompt_length",
)
"""Overrides with which a job cannot start."""


@pytest.mark.parametrize("override", WRONG)
def test_what_keeps_a_job_from_starting_is_shown_with_its_setting(override, job):
    found = findings(*job, override)
    shown = [
        subject + message for subject, (verdict, message) in found.items() if verdict == "wrong"
    ]
    assert len(shown) == 1
    assert override.split(".")[-1].split("=")[0] in shown[0]


def test_a_section_that_is_null_is_no_fault_of_the_doctor(job):
    assert "could not be checked" not in str(findings(*job, "data.custom_cls=null"))


def test_a_budget_below_a_row_is_warned_of(job):
    setting = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    verdict, message = findings(*job, f"{setting}=512")[setting]
    assert verdict == "warning"
    assert message.startswith("512")


def test_gpus_that_do_not_divide_into_those_of_a_row_are_named(job):
    setting = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    attention = "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"
    verdict, message = findings(*job, f"{setting}=3", attention)["actor_rollout_ref.actor"]
    assert verdict == "wrong"
    assert "2 GPUs, and 3" in message
