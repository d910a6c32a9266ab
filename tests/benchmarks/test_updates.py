"""What is told beside the seconds of an update: tokens that are computed, and the memory of workers."""

import os
from types import SimpleNamespace

import pytest
import torch

from benchmarks.train_step import SIDES
from benchmarks.two_ranks import peak_of, start_peak
from benchmarks.updates import Side, computed_tokens, steps_of

MIB = 2**20


def test_rows_that_are_padded_compute_as_many_tokens_as_the_longest_of_their_micro_batch():
    # Two ranks of six rows, in two mini-batches of three rows each, in micro-batches of two rows and one.
    tokens_R = [5, 3, 9, 1, 1, 1, 2, 8, 4, 7, 7, 6]
    padded = Side(name="padded", strategy=None, micro_batch_rows=2, packs=False)
    assert computed_tokens(tokens_R, padded, mini_rows=6) == 2 * 5 + 9 + 2 * 1 + 1 + 2 * 8 + 4 + 2 * 7 + 6
    assert computed_tokens(tokens_R, SIDES[0], mini_rows=6) == sum(tokens_R)


@pytest.mark.parametrize("norm", [0.0, float("nan")])
def test_an_update_with_a_step_that_learns_nothing_ends_the_benchmark(norm):
    assert steps_of({"metrics": {"grad_norm": [0.5, 0.25]}}) == {"steps": 2, "grad_norm": [0.5, 0.25]}
    with pytest.raises(AssertionError, match="learns nothing"):
        steps_of({"metrics": {"grad_norm": [0.5, norm]}})


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no such peaks on this system")
def test_the_peak_of_a_worker_is_what_it_held_since_it_was_started_anew():
    here = SimpleNamespace(execute_with_func_generator=lambda function: function(None))
    start_peak(here)
    before = peak_of(here)
    held = torch.ones(200 * MIB // 4)
    del held
    assert 190 * MIB < peak_of(here) - before < 250 * MIB
    start_peak(here)
    assert peak_of(here) - before < 50 * MIB
