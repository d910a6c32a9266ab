"""Every refusal of the plug-in, read: each says what it is about, its value, and what to do.

They are found in the source, so that a new one is read as well; that they are raised when they should be is for the
tests of the modules that they are in.
"""

import re

import pytest

from tests.support.refusals import CLASSES, REFUSALS
from verl_padding import errors
from verl_padding.plan import errors as plan_errors

OURS = [refusal for refusal in REFUSALS if refusal.kind in CLASSES]

ABOUT = re.compile(
    r"^(\{|[\w.{}]+=|field |row |verl |step |worker call |rows of |the (config|operations|engine) of |"
    r"the transferqueue |transferqueue's partition |--|a |no )",
    re.IGNORECASE,
)
"""A setting, an option, a row, a field, a file, or a quantity with its number."""
FIX = re.compile(
    r"\b(set|choose|choices|raise|install|correct|name|change|start|store|look|give|make|clear|keep|extend|leave|put|must)\b|"
    r"\b(is|are|be) (needed|set|at least|there once)\b|at least|\?$",
    re.IGNORECASE,
)
"""What to do: an order, what is needed, what may be chosen; or a question whose answer is the fix."""
CARRIES_ANOTHER = re.compile(
    r"\{(refusal|_with_options\(str\(refusal\)\)|translate_plan_error\(refusal\)|error|self\.lost|_FIX|_OWN_CLUSTER)\}"
)
"""The message of the refusal behind it, or a constant that several messages share, with what to do."""

OF_A_PLAN = "plan/layout.py", "plan/batch_plan.py", "plan/rows.py"
"""Refusals of plans and rows that a program made, by their parts: there is no setting to name."""


def test_they_are_found_in_every_part_of_the_package():
    parts = {refusal.place.split("/")[0].split(":")[0] for refusal in OURS}
    assert {"config.py", "job", "pads", "plan", "driver"} <= parts
    assert len(OURS) > 80


@pytest.mark.parametrize("refusal", OURS, ids=lambda refusal: refusal.place)
def test_a_refusal_says_what_it_is_about_its_value_and_what_to_do(refusal):
    if not refusal.place.startswith(OF_A_PLAN):
        assert ABOUT.match(refusal.message), refusal.message
        assert "{" in refusal.message or "=" in refusal.message or "no real row" in refusal.message, refusal.message
        assert FIX.search(refusal.message) or CARRIES_ANOTHER.search(refusal.message), refusal.message


def test_every_error_of_ours_is_one_of_two_roots_and_a_value_error_for_users():
    assert {"PaddingError", "PaddingConfigError", "PaddingDataError", "PlanError"} <= CLASSES
    assert issubclass(errors.PaddingConfigError, ValueError)
    assert issubclass(errors.PaddingDataError, ValueError)
    assert issubclass(plan_errors.PlanError, ValueError)
