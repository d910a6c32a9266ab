"""What functions and classes in a user's files take and have: read from their source, which is not run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from verl_padding.doctor.bound_names import Function, names_bound
from verl_padding.doctor.named_objects import file_of, module_and_name, parsed


def defined_in(source: Path | None, name: str) -> ast.stmt | None:
    """The plain definition of a function or class at the top of a file; None for what is made in another way."""
    found = _only_definition(parsed(source), name) if source else None
    return found if found is not None and not found.decorator_list else None


def _only_definition(tree: ast.Module | ast.ClassDef, name: str) -> Function | ast.ClassDef | None:
    """The one statement of a module or class that gives something its name; None if there is none, or another one."""
    found: list[Function | ast.ClassDef] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                if node not in tree.body:
                    return None
                found.append(node)
            case ast.Attribute(attr=attribute, ctx=ast.Store()) if attribute == name:
                return None
            case ast.alias(name="*") | ast.Name(id="globals" | "setattr" | "exec"):
                return None
            case _ if name in names_bound(node):
                return None
    return found[0] if len(found) == 1 else None


def refuse_other_parameters(module: str, name: str, given: Sequence[str]) -> None:
    """Looks whether a function takes arguments of some names, and no others.

    Args:
        module: path of a file, or ``pkg://`` and a module, which is there.

    Raises:
        LookupError: it does not, with a sentence. What is no plain function at the top of the file is let pass.
    """
    function = defined_in(file_of(module), name)
    if isinstance(function, Function):
        refuse_call(function, given)


def refuse_call(function: Function, given: Sequence[str], *, positional: int = 0, or_more: bool = False) -> None:
    """Looks whether a function can be called.

    Args:
        given: names of the arguments that it is given by name.
        positional: how many it is given before these, ``self`` among them.
        or_more: it may be given others by name, too.

    Raises:
        LookupError: it cannot, with a sentence.
    """
    name, takes = function.name, function.args
    plain = [*takes.posonlyargs, *takes.args]
    if len(plain) < positional and not takes.vararg:
        raise LookupError(f"{name}() takes {len(plain)} arguments without a name, and is given {positional}")
    by_name = {each.arg for each in (*takes.args[max(0, positional - len(takes.posonlyargs)) :], *takes.kwonlyargs)}
    if not takes.kwarg and (missing := [each for each in given if each not in by_name]):
        raise LookupError(
            f"{name}() takes no argument {missing[0]!r}: it is called with {', '.join(given)}, by these names"
        )
    needed = plain[positional : len(plain) - len(takes.defaults)]
    needed += [each for each, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value is None]
    nameless = {each.arg for each in takes.posonlyargs}
    lacking = [each.arg for each in needed if each.arg not in given or each.arg in nameless]
    if lacking and not or_more:
        raise LookupError(
            f"{name}() needs an argument {lacking[0]!r}, which nobody gives it: it is called with {', '.join(given)}, "
            "by these names"
        )


def method(owner: ast.ClassDef, name: str) -> Function | None:
    """The method that a class itself defines, without decorators that could change what it takes."""
    found = _only_definition(owner, name)
    if not isinstance(found, Function) or found.decorator_list or not all(map(_leaves_as_is, owner.decorator_list)):
        return None
    return found


def lacks_attribute(source: Path, owner: ast.ClassDef, name: str) -> bool:
    """Whether neither a class nor any class that it extends has an attribute; False if that cannot be known."""
    try:
        return not _is_given_later(parsed(source), name) and _lacks(source, owner, name, frozenset())
    except LookupError:  # a file that cannot be read
        return False


Seen = frozenset[tuple[Path, str]]
"""Names whose bases are being looked for: a class may extend one of its own name."""


def _lacks(source: Path, owner: ast.ClassDef, name: str, seen: Seen) -> bool:
    if owner.keywords or not all(_leaves_as_is(decorator) for decorator in owner.decorator_list):
        return False
    for node in owner.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == "__getattr__":
                    return False
                if node.name == name:
                    return any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
            case _:
                if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node)):
                    return False
    return all(isinstance(base, ast.Name) and _name_lacks(source, base.id, name, seen) for base in owner.bases)


def _leaves_as_is(decorator: ast.expr) -> bool:
    """Whether it is one that gives back the class itself: verl's ``register``, or ``dataclass``."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(called, "id", getattr(called, "attr", None)) in ("register", "dataclass")


def _name_lacks(source: Path, owner: str, name: str, seen: Seen) -> bool:
    """The same for what a file has under a name, looked for in the file that it is imported from, if that is verl's."""
    if (source, owner) in seen:
        return False
    seen |= {(source, owner)}
    tree = parsed(source)
    if _is_given_later(tree, name):
        return False
    imported = [
        (node, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if owner == (alias.asname or alias.name.split(".")[0]) or alias.name == "*"
    ]
    bound = any(
        getattr(node, "id", getattr(node, "name", None)) == owner
        and not isinstance(node, ast.alias)
        and not isinstance(getattr(node, "ctx", None), ast.Load)
        for node in ast.walk(tree)
    )
    if not bound and not imported:
        return owner in ("object", "ABC")
    if not imported:
        found = _only_definition(tree, owner)
        return isinstance(found, ast.ClassDef) and _lacks(source, found, name, seen)
    line, original = imported[0]
    if bound or len(imported) > 1 or not isinstance(line, ast.ImportFrom) or line not in tree.body:
        return False  # which of them it is, only a run would tell
    if line.module == "abc":
        return original == "ABC"
    module = _file_of_verl(source, line)
    return module is not None and _name_lacks(module, original, name, seen)


def _is_given_later(tree: ast.Module, name: str) -> bool:
    """Whether a file sets an attribute of some object that is no ``self``: perhaps of the class that is asked for."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                continue
            case ast.Attribute(attr=attribute, ctx=ast.Store()) if attribute == name:
                return True
            case ast.Name(id="setattr"):
                return True
    return False


def _file_of_verl(source: Path, imported: ast.ImportFrom) -> Path | None:
    """The file that a line of ``source`` imports from; None if it is not of verl."""
    module = imported.module or ""
    if not imported.level:
        return file_of(f"pkg://{module}") if module.split(".")[0] == "verl" else None
    verl = file_of("pkg://verl")
    if verl is None or verl.parent not in source.parents:
        return None
    place = source.parents[imported.level - 1].joinpath(*filter(None, module.split(".")))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def class_of_target(target: str) -> tuple[Path, ast.ClassDef] | None:
    """The file and definition of a class that is named by a dotted path; None for anything else."""
    module, name = module_and_name(target)
    if not target.endswith(f"{module}.{name}"):
        return None  # a method of it
    source = file_of(f"pkg://{module}")
    found = _only_definition(parsed(source), name) if source else None
    return (source, found) if source is not None and isinstance(found, ast.ClassDef) else None
