"""Zero effect on each engine in each shape: padded ranks end with the weights of one rank that
never saw a pad."""

import pytest

from tests.support.engine_shapes import SHAPES, started
from tests.support.updates import CUTS, assert_updates_agree

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("transfer_queue"),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(shape, marks=shape.marks, id=name) for name, shape in SHAPES.items()],
)
def shape_and_both(request, model_of, one_rank_of):
    """A shape, its padded ranks, and one rank that does not see a pad."""
    shape = request.param
    with started(shape, model_of(shape)) as padded_ranks:
        yield shape, padded_ranks, one_rank_of(shape)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_padded_ranks_end_with_the_weights_of_one_rank_without_pads(cut, shape_and_both):
    shape, *both = shape_and_both
    if cut not in shape.cuts:
        pytest.skip("no cut of this shape")
    assert_updates_agree(*both, **cut, **shape.planned, update=shape.update)
