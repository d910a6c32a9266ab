"""The benchmark of trees runs where no GPU is, and what it measures is right."""

import json
import subprocess
import sys

from tests.support.pages import ROOT

SMALL = [sys.executable, "-m", "benchmarks.tree_attention", "--small", "--repeats", "1"]


def test_chains_and_trees_share_what_rows_share_and_change_nothing():
    run = subprocess.run(SMALL, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    factors = {}
    for line in filter(None, run.stdout.splitlines()):
        figures = json.loads(line)
        factors.setdefault(figures["batch"], []).append(figures["sharing_factor"])
        assert figures["error_float32"] < 1e-5
    # Rows alone, chains, trees.
    assert [each[0] for each in factors.values()] == [1.0] * 3
    assert [each[1] > 1 for each in factors.values()] == [False, False, True]
    assert [each[2] > 2.5 for each in factors.values()] == [True] * 3
