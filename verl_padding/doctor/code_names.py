"""What a Python file, or a module, defines: by its text, since to import it is to run it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path


def find_module(name: str) -> Path | None:
    """The file of a module, or the folder of a namespace package, and nothing is imported; None if
    there is none."""
    # importlib's find_spec imports the packages above a module.
    where, spec = None, None
    parts = name.split(".")
    for depth in range(len(parts)):
        above = ".".join(parts[: depth + 1])
        spec = _find_spec(above, where)
        if spec is None:
            return None
        # A package that is imported may have changed where its modules are.
        where = getattr(sys.modules.get(above), "__path__", spec.submodule_search_locations)
    assert spec is not None
    return Path(spec.origin if spec.has_location and spec.origin else next(iter(where or ["."])))


def _find_spec(name: str, where: list[str] | None) -> ModuleSpec | None:
    found = (finder.find_spec(name, where) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def defined_in(file: Path) -> list[str] | None:
    """Names that a module has, None where only running it would tell.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    if file.suffix != ".py":
        return None
    nodes = list(_statements(ast.parse(file.read_bytes(), str(file))))
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in nodes):
        return None
    names = [name for node in nodes for name in _bound(node)]
    return None if "*" in names else names


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """Statements that are run on import, those of branches as well."""
    for node in ast.iter_child_nodes(block):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(node)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.split(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
