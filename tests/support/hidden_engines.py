"""Hides packages of engines from a process whose verl imports this module (``VERL_USE_EXTERNAL_MODULES``)."""

import os
import sys

HIDDEN = "VERL_PADDING_TESTS_HIDE"
"""Environment variable: the packages, separated by commas."""

for package in filter(None, os.environ.get(HIDDEN, "").split(",")):
    assert package not in sys.modules, "it was imported before"
    sys.modules[package] = None  # type: ignore[assignment]  # importing it then ends with an ImportError
