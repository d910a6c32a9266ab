"""What functions in a user's files give back, as far as their source tells it without a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
PLAIN = (
    ast.Constant,
    ast.JoinedStr,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.ListComp,
    ast.DictComp,
    ast.SetComp,
    ast.Compare,
)
"""Expressions whose kind of value shows."""
SCORE = "score"
"""Key by which verl finds the score in a mapping."""


def never_returns(function: Function) -> bool:
    """Whether a function can give back nothing but None."""
    if is_generator(function):
        return False
    if any(not _is_none(value) for value in _returned(function)):
        return False
    return not isinstance(function.body[-1], ast.Raise)  # a stub, which says so itself


def is_generator(function: Function) -> bool:
    """Whether it yields what it makes."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))


def gives_nothing_to_await(function: ast.FunctionDef, plain_calls: tuple[str, ...]) -> bool:
    """Whether all that a function gives back is of a kind that cannot be awaited.

    Args:
        plain_calls: what may be called for such a value.
    """
    values = [found for value in _returned(function) for found in _values(function, value)]
    return all(
        isinstance(value, PLAIN) or (isinstance(value, ast.Call) and ast.unparse(value.func) in plain_calls)
        for value in values
    )


def no_scores(function: Function) -> tuple[set[str], bool]:
    """Returns: kinds of what a function gives back that are no score for verl, and whether it gives no other."""
    if is_generator(function):
        return set(), False
    kinds = [_no_score(found) for value in _returned(function) for found in _values(function, value)]
    return {kind for kind in kinds if kind}, all(kinds)


def _no_score(value: ast.expr) -> str:
    """What a value is that is no score, "" for one that may be."""
    match value:
        case ast.Tuple():
            return "a tuple"
        case ast.List() | ast.ListComp():
            return "a list"
        case ast.Set() | ast.SetComp():
            return "a set"
        case ast.JoinedStr() | ast.Constant(value=str()):
            return "a text"
        case ast.Constant(value=None):
            return "None"
    names = _keys(value)
    return "" if names is None or SCORE in names else f"a mapping of {', '.join(names) or 'nothing'}"


def keys_beside_scores(function: Function, of_numbers: str) -> set[str] | None:
    """All keys that verl's reward managers may find in what a function gives back; None where that does not show.

    Args:
        of_numbers: the key under which they put a number that is given back by itself.
    """
    if is_generator(function):
        return None
    keys: set[str] = set()
    for value in (found for returned in _returned(function) for found in _values(function, returned)):
        names = [of_numbers] if _is_number(value) else _keys(value)
        if names is None:
            return None
        keys |= set(names)
    return keys


def _keys(value: ast.expr) -> list[str] | None:
    """Keys of a mapping that is written down; None for anything else."""
    match value:
        case ast.Dict(keys=keys) if all(isinstance(key, ast.Constant) for key in keys):
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(each.arg for each in keywords):
            return [str(each.arg) for each in keywords]
    return None


def _is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=int() | float()) | ast.Compare() | ast.Call(func=ast.Name(id="float" | "int" | "len")):
            return True
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_number(operand)
    return False


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _returned(function: Function) -> list[ast.expr]:
    """Expressions behind ``return``; that of None where there is none."""
    found = [node.value for node in _own_nodes(function) if isinstance(node, ast.Return)]
    return [value or ast.Constant(value=None) for value in found]


def _values(function: Function, value: ast.expr) -> list[ast.expr]:
    """What an expression may stand for: both sides of a condition, and all that a local name is set to."""
    if isinstance(value, ast.IfExp):
        return [found for side in (value.body, value.orelse) for found in _values(function, side)]
    if not isinstance(value, ast.Name):
        return [value]
    stored = [
        node
        for node in _own_nodes(function)
        if isinstance(node, ast.Name) and node.id == value.id and isinstance(node.ctx, ast.Store)
    ]
    parameters = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    set_to = [found for node in _own_nodes(function) for found in _set_to(node, value.id)]
    if value.id in parameters or not stored or len(set_to) != len(stored):
        return [value]
    # what is put into a mapping later does not show
    return [value] if any(isinstance(found, ast.Dict | ast.Call | ast.Name) for found in set_to) else set_to


def _set_to(node: ast.AST, name: str) -> list[ast.expr]:
    """Values that a plain assignment gives a name."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=annotated), value=value) if annotated == name and value is not None:
            return [value]
        case ast.Assign(targets=targets, value=value):
            found: list[ast.expr] = []
            for target in targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(value)
                elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = zip(target.elts, value.elts, strict=False)
                    found += [each for left, each in pairs if isinstance(left, ast.Name) and left.id == name]
            return found
    return []


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """All that a function does itself, and not the functions inside of it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
