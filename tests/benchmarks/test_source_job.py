"""Which optimizer steps are of which batch, as workers and the rollout dump have them."""

import pytest

from benchmarks.source_job import steps_of_batches


def test_steps_are_of_the_batch_whose_rows_they_hold_and_those_of_pads_alone_of_the_one_before():
    assert steps_of_batches([4, 4, 1, 0, 0, 4, 2, 3, 0], [9, 6, 3]) == [[4, 4, 1, 0, 0], [4, 2], [3, 0]]


@pytest.mark.parametrize(("real_rows", "rows"), [([4, 4], [9]), ([4, 4, 2], [9]), ([4, 4, 1, 3], [9]), ([4], [4, 2])])
def test_steps_that_do_not_train_each_row_of_a_batch_once_are_refused(real_rows, rows):
    with pytest.raises(ValueError, match="batch"):
        steps_of_batches(real_rows, rows)
