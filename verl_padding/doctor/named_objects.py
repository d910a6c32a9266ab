"""Whether a Python file or module holds an object of some name; found out without running the user's code."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

MAKES_NAMES = {"*", "__getattr__", "globals", "setattr", "exec"}
"""What a module that makes names as it runs has among its own: it may hold any name."""
PACKAGE_PREFIX, FILE_PREFIX = "pkg://", "file://"
"""As verl's ``load_module`` reads them; a path without either is a file."""


def refuse_missing_object(module: str, name: str) -> None:
    """Looks for an object as verl's ``load_extern_object`` would.

    Args:
        module: path of a file, or ``pkg://`` and a module.

    Raises:
        LookupError: there is no such file, module or object, with a sentence.
    """
    _refuse_without(_file_of(module), name)


def _file_of(module: str) -> Path | None:
    if module.startswith(PACKAGE_PREFIX):
        return _source_of(module.removeprefix(PACKAGE_PREFIX).replace("/", "."))
    source = Path(module.removeprefix(FILE_PREFIX))
    if not source.is_file():
        raise LookupError("there is no such file")
    return source


def refuse_missing_target(target: str) -> None:
    """The same for a dotted path such as ``my_package.loops.MyLoop``, or a method of such a class.

    Raises:
        LookupError: as above.
    """
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError("a dotted path is needed, such as my_package.my_module.MyClass")
    outer, _, last = module.rpartition(".")
    if outer and last[:1].isupper() and not is_module(module):
        module, name = outer, last  # a class, and something in it
    _refuse_without(_source_of(module), name)


def is_module(name: str) -> bool:
    """Whether there is a module of this name on Python's path; it is not run."""
    try:
        _source_of(name)
    except LookupError:
        return False
    return True


def _source_of(module: str) -> Path | None:
    """The file of a module; None if it is not of Python, or is in a place that only importing would tell."""
    top, *parts = module.split(".")
    try:
        spec = find_spec(top)
    except Exception:  # what is on Python's path may raise anything
        spec = None
    if not top or spec is None:
        raise LookupError(f"there is no module {top!r} on Python's path")
    if not parts:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder).joinpath(*parts)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
        if place.is_dir() or any(place.parent.glob(f"{place.name}.*")):
            return None  # a namespace, or compiled
    try:
        spec = find_spec(module)  # runs the packages on the way: an installation may keep one of them elsewhere
    except Exception:
        spec = None
    if spec is None:
        raise LookupError(f"there is no module {module!r} on Python's path")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _refuse_without(source: Path | None, name: str) -> None:
    if source is None:
        return
    tree = _parsed(source)
    names = _names_of(tree)
    if name not in names and not names & MAKES_NAMES:
        raise LookupError(f"{source} has no {name!r}")
    for node in tree.body:  # at the very top: below `if` and `try` a module may be left out
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            imported = [node.module]
        for module in imported:
            if not is_module(module.split(".")[0]):
                raise LookupError(f"{source} imports {module!r}, and there is no such module on Python's path")


def _parsed(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_text(encoding="utf-8"), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        raise LookupError(f"{source} cannot be read as Python ({error})") from error


def refuse_other_parameters(module: str, name: str, given: Sequence[str]) -> None:
    """Looks whether a function takes arguments of some names.

    Args:
        module: as for :func:`refuse_missing_object`, which has found it.

    Raises:
        LookupError: it does not, with a sentence. What is no plain function at the top of the file is let pass.
    """
    source = _file_of(module)
    for node in _parsed(source).body if source else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and not node.args.kwarg:
            takes = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            if missing := [each for each in given if each not in takes]:
                raise LookupError(
                    f"{name}() takes no argument {missing[0]!r}: it is called with {', '.join(given)}, by these names"
                )


def _names_of(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top, also below ``if``, ``try`` and ``with``; and `MAKES_NAMES` of it."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)  # what is in it is not of the module
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        else:
            if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in MAKES_NAMES):
                names.add(node.id)
            waiting += ast.iter_child_nodes(node)
    return names
