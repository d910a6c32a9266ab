"""The page of results says what the kept figures say."""

import json
import re

import pytest

from benchmarks.results import VERSIONS, kept_file
from benchmarks.results_page import PAGE, rendered
from tests.support.pages import ROOT

BENCHMARKS = sorted(set(re.findall(r"`python -m benchmarks\.(\w+)`, \d", PAGE.read_text())))


def test_the_page_is_what_the_kept_figures_make():
    assert len(BENCHMARKS) >= 8
    assert PAGE.read_text() == rendered(), "run python -m benchmarks.results_page"


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_kept_file_says_what_it_was_measured_on(benchmark):
    told = json.loads(kept_file(benchmark).read_text())
    assert told["benchmark"] == benchmark
    assert {"processor", "cores", "memory_gib", "system", "python"} <= told["machine"].keys()
    assert all(told["versions"][name] for name in VERSIONS)
    timed = "busy_cores()" in (ROOT / "benchmarks" / f"{benchmark}.py").read_text()
    assert ("cores_busy_with_other_work" in told["machine"]) == timed
