"""Copies as Ray hands them to another process."""

import threading

import numpy as np
import pytest
import torch

from verl_padding.on_cpu.dry_run.copies import by_value


def test_a_copy_has_read_only_arrays_and_tensors_of_its_own():
    given = {"array": np.zeros(3), "nested": [{"array": np.zeros(2)}], "tensor": torch.zeros(3)}
    copy = by_value(given)
    copy["tensor"][0] = 1.0
    assert not given["tensor"].any()
    assert not copy["array"].flags.writeable
    assert not copy["nested"][0]["array"].flags.writeable
    with pytest.raises(TypeError, match="pickle"):
        by_value({"lock": threading.Lock()})
