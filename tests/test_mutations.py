"""The faults of ``python -m tests.mutations`` can still be put in; whether a test notices is that command's to say."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.fault)
def test_a_fault_can_be_put_in_and_leaves_code_that_python_reads(mutation, tmp_path: Path):
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.file, copy)
    mutation.apply(tmp_path)
    assert copy.read_text() != (ROOT / mutation.file).read_text()
    ast.parse(copy.read_text())
    for argument in mutation.tests.split():
        assert (ROOT / argument).exists()
