"""The results on the page of evidence say what the kept figures say."""

import pytest

from benchmarks.results import kept
from benchmarks.results_page import PAGE, RESULTS, part_of, rendered
from benchmarks.runs import CASES, recipe_of


def test_the_page_is_what_the_kept_figures_make():
    assert rendered() == part_of(PAGE.read_text(), RESULTS), "run python -m benchmarks.results_page"


@pytest.mark.parametrize("name", CASES)
def test_kept_runs_are_of_the_recipe_as_it_is(name):
    told = kept(f"runs {name}")["recipe"]
    assert told == recipe_of(CASES[name].recipe), f"run python -m benchmarks.runs {name} --keep"
