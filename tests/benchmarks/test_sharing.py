"""The rows on which the benchmark of shared prefixes measures."""

import pytest

from benchmarks.results import kept
from tests.equivalence.sharing import ENGINES, budget, cases


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_those_of_the_kept_figures_and_fit_the_budget(engine):
    rows = {name: it["rows"] for name, it in kept(f"sharing {engine}")["cases"].items()}
    assert {name: len(texts) for name, texts in cases(engine).items()} == rows
    for texts in cases(engine).values():
        assert max(len(asked + said) for asked, said in texts.values()) <= budget(engine)
