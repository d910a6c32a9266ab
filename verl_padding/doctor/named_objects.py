"""Whether a Python file or module holds an object of some name; found out without running the user's code."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

PACKAGE_PREFIX, FILE_PREFIX = "pkg://", "file://"
"""As verl's ``load_module`` reads them; a path without either is a file."""


def refuse_missing_object(module: str, name: str) -> None:
    """Looks for an object as verl's ``load_extern_object`` would.

    Args:
        module: path of a file, or ``pkg://`` and a module.

    Raises:
        LookupError: there is no such file, module or object, with a sentence.
    """
    if module.startswith(PACKAGE_PREFIX):
        source = _source_of(module.removeprefix(PACKAGE_PREFIX).replace("/", "."))
    else:
        source = Path(module.removeprefix(FILE_PREFIX))
        if not source.is_file():
            raise LookupError("there is no such file")
    _refuse_without(source, name)


def refuse_missing_target(target: str) -> None:
    """The same for a dotted path such as ``my_package.loops.MyLoop``.

    Raises:
        LookupError: as above.
    """
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError("a dotted path is needed, such as my_package.my_module.MyClass")
    _refuse_without(_source_of(module), name)


def _source_of(module: str) -> Path | None:
    """The file of a module; None if it is not of Python."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise LookupError(f"there is no module {module!r} on Python's path")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _refuse_without(source: Path | None, name: str) -> None:
    if source is None:
        return
    try:
        names = _names_of(ast.parse(source.read_text(encoding="utf-8"), str(source)))
    except (OSError, SyntaxError, ValueError) as error:
        raise LookupError(f"{source} cannot be read as Python ({error})") from error
    # A module may make names as it runs; these two ways can be seen.
    if name not in names and not names & {"*", "__getattr__"}:
        raise LookupError(f"{source} has no {name!r}")


def _names_of(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top, also below ``if`` and ``try``."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        else:
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    return names
