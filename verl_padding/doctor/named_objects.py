"""Whether a Python file or module holds an object of some name; found out without running the user's code."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from verl_padding.doctor.bound_names import Function, names_bound

MAKES_NAMES = {"*", "__getattr__", "globals", "setattr", "exec"}
"""What a module that makes names as it runs has among its own: it may hold any name."""
MOVES_PATH = {"sys", "site", "importlib", "subprocess"}
"""What a file uses at its top where it makes more modules known, or gets them."""
PACKAGE_PREFIX, FILE_PREFIX = "pkg://", "file://"
"""As verl's ``load_module`` reads them; a path without either is a file."""


def refuse_missing_object(module: str, name: str) -> None:
    """Looks for an object as verl's ``load_extern_object`` would.

    Args:
        module: path of a file, or ``pkg://`` and a module.

    Raises:
        LookupError: there is no such file, module or object, with a sentence.
    """
    _refuse_without(file_of(module), name, package=_package_of(module))


def file_of(module: str) -> Path | None:
    """The file of a module that is named as above; None if it is not of Python, or is not known without a run.

    Raises:
        LookupError: there is none, with a sentence.
    """
    if module.startswith(PACKAGE_PREFIX):
        return _source_of(module.removeprefix(PACKAGE_PREFIX).replace("/", "."))
    source = Path(module.removeprefix(FILE_PREFIX))
    if not source.is_file():
        raise LookupError("there is no such file")
    return source


def _package_of(module: str) -> str:
    """The package that relative imports of a module start from, "" for none: verl loads a file by its path alone."""
    if not module.startswith(PACKAGE_PREFIX):
        return ""
    return _package_of_dotted(module.removeprefix(PACKAGE_PREFIX).replace("/", "."))


def _package_of_dotted(module: str) -> str:
    source = _source_of(module)
    return module if source is not None and source.name == "__init__.py" else module.rpartition(".")[0]


def refuse_missing_target(target: str) -> None:
    """The same for a dotted path such as ``my_package.loops.MyLoop``, or a method of such a class.

    Raises:
        LookupError: as above.
    """
    module, name = module_and_name(target)
    _refuse_without(_source_of(module), name, package=_package_of_dotted(module))


def module_and_name(target: str) -> tuple[str, str]:
    """The module of a dotted path, and what is named in it; of a method, its class.

    Raises:
        LookupError: it is no dotted path, with a sentence.
    """
    module, _, name = target.rpartition(".")
    if not module:
        raise LookupError("a dotted path is needed, such as my_package.my_module.MyClass")
    outer, _, last = module.rpartition(".")
    if outer and last[:1].isupper() and not is_module(module):
        return outer, last
    return module, name


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
    except (Exception, SystemExit):
        spec = None
    if spec is None:
        raise LookupError(f"there is no module {module!r} on Python's path")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _refuse_without(source: Path | None, name: str, *, package: str) -> None:
    if source is None:
        return
    tree = parsed(source)
    names = _names_of(tree)
    if name not in names and not names & MAKES_NAMES:
        raise LookupError(f"{source} has no {name!r}")
    refuse_missing_imports(source, package=package)


def refuse_missing_imports(source: Path, *, package: str = "") -> None:
    """Looks for the modules that a file imports at its very top: below ``if`` and ``try`` a module may be left out.

    What follows a line that may change Python's path is let pass.

    Args:
        package: what its relative imports start from; "" for a file that is loaded by its path.

    Raises:
        LookupError: one of them is not there, with a sentence.
    """
    for node in parsed(source).body:
        if _moves_path(node):
            return
        if isinstance(node, ast.ImportFrom) and node.level:
            written = "." * node.level + (node.module or "")
            if node.level > len(package.split(".")) or not package:
                raise LookupError(
                    f"{source} imports {written!r}, which needs a package around it, and verl loads the file alone. "
                    "Import it by its full name"
                )
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            if node.module and not is_module(".".join([*parents, node.module])):
                raise LookupError(f"{source} imports {written!r}, and its package has no such module")
            continue
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [node.module]
        for module in imported:
            top = module.split(".")[0]
            if not is_module(top):
                raise LookupError(
                    f"{source} imports {module!r}, and there is no such module on Python's path (pip install {top}?)"
                )


def _moves_path(node: ast.stmt) -> bool:
    """Whether a statement at the top of a file may make more modules known: functions are let pass, and imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    return any(isinstance(each, ast.Name) and each.id in MOVES_PATH for each in ast.walk(node)) or any(
        isinstance(each, ast.alias) and each.name.split(".")[0] in MOVES_PATH for each in ast.walk(node)
    )


def parsed(source: Path) -> ast.Module:
    """The tree of a file of Python.

    Raises:
        LookupError: it cannot be read as one, with a sentence.
    """
    try:
        return ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise LookupError(f"{source} cannot be read as Python ({error})") from error


def _names_of(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top, also below ``if``, ``try`` and ``with``; and `MAKES_NAMES` of it.

    And those that its functions bind there, which one of them may have done when the module was loaded.
    """
    names = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        names |= set(names_bound(node))
        if isinstance(node, ast.Name) and node.id in MAKES_NAMES:
            names.add(node.id)
        if not isinstance(node, Function | ast.ClassDef):  # what is in it is not of the module
            waiting += ast.iter_child_nodes(node)
    return names
