"""What users import, call and set: a change here is a change for them, and belongs into the
CHANGELOG."""

import inspect
import re
from dataclasses import fields

import verl_padding
from verl_padding import plan
from verl_padding.driver import trainers
from verl_padding.driver.mixin import PaddedTrainer

VERBS = {
    "plan_batch": "(rows: Rows, job: Job) -> BatchPlan",
    "real_rows": "(batch: Any) -> Any",
    "strip": "(batch: ~Batch) -> ~Batch",
    "upsample": (
        "(batch: ~Batch, multiple: int, *, eos_token_id: int = 0, length: int | None = None, "
        "fields: Mapping[str, FieldFormat] | None = None, "
        "image: Callable[[Mapping[str, Tensor]], SmallestImage] | None = None) -> ~Batch"
    ),
}


def signature(function) -> str:
    """Without the modules of its types, and whether or not they are written in quotes."""
    return re.sub(r"'|\b\w+\.", "", str(inspect.signature(function)))


def test_the_verbs_at_the_top_have_these_signatures():
    assert verl_padding.__all__ == ["__version__", *VERBS]
    assert {name: signature(getattr(verl_padding, name)) for name in VERBS} == VERBS


OF_PLANS = {
    plan.Rows: "key_R prompt_R tokens_R tries zero_advantage",
    plan.Job: (
        "strategy prompts sessions_per_prompt updates inference row_multiple pad_tokens cost_model"
        " packer sharing may_branch seed optimizer_steps prompts_setting sessions_setting"
    ),
    plan.Update: "prompts_per_mini_batch shuffle mini_batch_setting",
    plan.Pass: "as_update",
}


def test_what_a_plan_is_made_from_has_these_fields():
    for made, names in OF_PLANS.items():
        assert set(names.split()) <= {field.name for field in fields(made)}, made
    of_call = {
        "dp_size",
        "token_budget",
        "micro_batch_rows",
        "micro_batch_multiple",
        "sync_point",
        "padded_to",
    }
    for made in (plan.Pass, plan.Update):
        assert of_call <= {field.name for field in fields(made)}


def test_the_choices_and_the_trainers_have_these_names():
    assert sorted(plan.STRATEGIES) == ["lcm", "prompt", "rows"]
    assert sorted(plan.COST_MODELS) == ["attention", "tokens"]
    for name in ("PaddedTrainerSync", "PaddedTrainerColocateAsync", "PaddedTrainerSeparateAsync"):
        assert issubclass(getattr(trainers, name), PaddedTrainer)
