"""Equality of what rows hold: tensors, arrays, dicts of them, anything else."""

import numpy as np
import torch


def assert_equal(got, want, name=""):
    assert type(got) is type(want), name
    if isinstance(want, dict):
        assert got.keys() == want.keys(), name
        for key in want:
            assert_equal(got[key], want[key], f"{name}.{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, name
        if got.dtype.itemsize == 1:  # torch compares no float8
            got, want = got.float(), want.float()
        assert torch.equal(got, want), name
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype, name
        assert np.array_equal(got, want), name
    else:
        assert got == want, name
