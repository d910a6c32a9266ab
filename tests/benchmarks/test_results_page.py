"""The results on the page of evidence say what the kept figures say."""

import json
import re

import pytest

from benchmarks.results import VERSIONS, kept_file
from benchmarks.results_page import PAGE, RESULTS, part_of, rendered

SHOWN = part_of(PAGE.read_text(), RESULTS)
COMMAND = r"python -m benchmarks\.(\w+(?: \w+)?)[^`]*`, \d"
BENCHMARKS = sorted(set(re.findall(COMMAND, SHOWN)))
OTHERS = ("zero_effect", "runs source_job", "runs subagents")


def test_the_page_is_what_the_kept_figures_make():
    assert len(BENCHMARKS) >= 4
    assert rendered() == SHOWN, "run python -m benchmarks.results_page"


@pytest.mark.parametrize("benchmark", [*BENCHMARKS, *OTHERS])
def test_a_kept_file_says_what_it_was_measured_on(benchmark):
    told = json.loads(kept_file(benchmark).read_text())
    assert told["benchmark"] == benchmark
    assert {"processor", "cores", "memory_gib", "python"} <= told["machine"].keys()
    assert all(told["versions"][name] for name in VERSIONS)
