"""The examples in docstrings."""

import doctest
import importlib

import pytest

from tests.support.pages import ROOT

NEEDS_A_QUEUE = ["pads/upsampling"]  # whose own tests run them
PACKAGE = ROOT / "verl_padding"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text()]
MODULES = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in FILES]


@pytest.mark.parametrize("module", [name for name in MODULES if name not in NEEDS_A_QUEUE])
def test_examples_in_docstrings_run(module):
    name = f"verl_padding.{module.replace('/', '.')}"
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
