"""The examples in docstrings."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module", ["planner", "rows", "mini_batches", "row_keys", "plural", "strategies.lcm"]
)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"verl_padding.plan.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
