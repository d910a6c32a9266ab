"""Tokens that rows share, computed once in verl's VeOmni engine, give in float64 what each row
gives alone."""

from dataclasses import replace

import pytest

from tests.support.sharing_ranks import Case, assert_exact, run_cases
from tests.support.tolerance import RELATIVE_FLOAT64

pytestmark = [pytest.mark.slow, pytest.mark.veomni, pytest.mark.timeout(1200)]

CASES = {
    name: Case(engine="veomni", **given)
    for name, given in {
        "dense": {},
        "awkward cuts": {"rows": "awkward"},
        "experts": {"kind": "qwen3_moe"},
        "critic": {"update": "critic"},
    }.items()
}
ULYSSES = {"ulysses_parallel_size": 2}


@pytest.mark.parametrize("sizes", [{}, ULYSSES], ids=["two ranks", "two ranks to a row"])
def test_rows_that_share_give_in_float64_what_each_gives_alone(sizes, tmp_path):
    # VeOmni makes its groups once a process.
    # Its ranks meet in each micro-batch, and these rows are not as many on each.
    dropped = set() if sizes else {"awkward cuts"}
    cases = {name: replace(CASES[name], sizes=sizes) for name in CASES.keys() - dropped}
    for found in run_cases(cases, 2, tmp_path / "2").values():
        assert_exact(found, RELATIVE_FLOAT64)
