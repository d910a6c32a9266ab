"""What functions in a user's files give back, as far as their source tells it without a run."""

from __future__ import annotations

import ast

from verl_padding.doctor.bound_names import Function, own_nodes, values_that_reach

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
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function.body))


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
    found = [node.value for node in own_nodes(function.body) if isinstance(node, ast.Return)]
    return [value or ast.Constant(value=None) for value in found]


def _values(function: Function, value: ast.expr) -> list[ast.expr]:
    """What an expression may stand for: both sides of a condition, and all that a local name is set to."""
    if isinstance(value, ast.IfExp):
        return [found for side in (value.body, value.orelse) for found in _values(function, side)]
    found = values_that_reach(function, value) if isinstance(value, ast.Name) else None
    # what is put into a mapping later does not show
    is_plain = found is not None and not any(isinstance(each, ast.Dict | ast.Call | ast.Name) for each in found)
    return found if found is not None and is_plain else [value]
