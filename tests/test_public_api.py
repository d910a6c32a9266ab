"""What users import, call and set: a change here is a change for them, and belongs into the
CHANGELOG."""

import inspect
import re

import verl_padding

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
