"""What functions and classes in a user's files take and have: read from their source, which is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_padding.doctor.named_objects import file_of, is_module, module_and_name, parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef


def defined_in(source: Path | None, name: str) -> ast.stmt | None:
    """The plain definition of a function or class at the top of a file; None for what is made in another way."""
    found = [
        node
        for node in (parsed(source).body if source else ())
        if isinstance(node, Function | ast.ClassDef) and node.name == name
    ]
    return found[-1] if found and not found[-1].decorator_list else None


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
    for node in owner.body:
        if isinstance(node, Function) and node.name == name and not node.decorator_list:
            return node
    return None


def lacks_attribute(source: Path, owner: ast.ClassDef, name: str) -> bool:
    """Whether neither a class nor any class that it extends has an attribute; False if that cannot be known."""
    if owner.keywords or not all(_leaves_as_is(decorator) for decorator in owner.decorator_list):
        return False
    for node in owner.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    return False
            case _:
                if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node)):
                    return False
    return all(_base_lacks(source, base, name) for base in owner.bases)


def _leaves_as_is(decorator: ast.expr) -> bool:
    """Whether it is one that gives back the class itself: verl's ``register``, or ``dataclass``."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(called, "id", getattr(called, "attr", None)) in ("register", "dataclass")


def _base_lacks(source: Path, base: ast.expr, name: str) -> bool:
    if not isinstance(base, ast.Name):
        return False
    for node in parsed(source).body:
        if isinstance(node, ast.ClassDef) and node.name == base.id:
            return lacks_attribute(source, node, name)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == base.id:
                    return _imported_lacks(node.module, alias.name, name)
    return base.id in ("object", "ABC")


def _imported_lacks(module: str, owner: str, name: str) -> bool:
    """verl's own classes are asked themselves; other classes of other modules are not looked into."""
    from importlib import import_module

    if module.split(".")[0] != "verl" or not is_module(module):
        return False
    found = getattr(getattr(import_module(module), owner, None), name, None)
    return found is None or bool(getattr(found, "__isabstractmethod__", False))


def never_returns(function: Function) -> bool:
    """Whether a function can give back nothing but None."""
    own = list(_own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own):
        return False
    given_back = [node.value for node in own if isinstance(node, ast.Return)]
    if any(value is not None and not (isinstance(value, ast.Constant) and value.value is None) for value in given_back):
        return False
    return not isinstance(function.body[-1], ast.Raise)  # a stub, which says so itself


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """All that a function does itself, and not the functions inside of it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def class_of_target(target: str) -> tuple[Path, ast.ClassDef] | None:
    """The file and definition of a class that is named by a dotted path; None for anything else."""
    module, name = module_and_name(target)
    if not target.endswith(f"{module}.{name}"):
        return None  # a method of it
    source = file_of(f"pkg://{module}")
    found = next(
        (
            node
            for node in (parsed(source).body if source else ())
            if isinstance(node, ast.ClassDef) and node.name == name
        ),
        None,
    )
    return (source, found) if source is not None and found is not None else None
