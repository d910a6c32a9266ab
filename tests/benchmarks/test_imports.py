"""Benchmarks stand by themselves: tests may import from them, and they from no test."""

import ast

from tests.support.pages import ROOT


def test_no_benchmark_imports_a_test():
    files = list((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "tests"], path
