"""Which names code binds, and which of their values are still there later: read from the source, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_bound(node: ast.AST) -> list[str]:
    """Names that a node itself binds, unbinds or takes from another scope, without what stands inside of it."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return [name]
        case ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.alias(name=name, asname=other):
            return [other or name.split(".")[0]]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return names
    return []


def own_nodes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """All that the body of a function does itself, and not the functions inside of it."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                waiting += [*node.decorator_list, *_defaults(node.args)]
            case ast.ClassDef():
                waiting += [*node.decorator_list, *node.bases, *node.keywords]
            case ast.Lambda():
                waiting += _defaults(node.args)
            case _:
                waiting += ast.iter_child_nodes(node)


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]


def values_that_reach(function: Function, used: ast.Name) -> list[ast.expr] | None:
    """All that a name may stand for where a function uses it; None where only a run would tell."""
    name, own = used.id, list(own_nodes(function.body))
    n_bound = sum(names_bound(node).count(name) for node in own)
    is_parameter = any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(function.args))
    by_others = any(isinstance(node, ast.Nonlocal) and name in node.names for node in ast.walk(function))
    if is_parameter or by_others or n_bound != sum(len(_set_to(node, name)) for node in own):
        return None
    place = next(i for i, statement in enumerate(function.body) if any(node is used for node in ast.walk(statement)))
    # what was set before a statement that always sets it is gone; what is set behind the use comes too late
    first = max((i for i in range(place) if _sets(function.body[i], name)), default=0)
    reaching = [found for node in own_nodes(function.body[first : place + 1]) for found in _set_to(node, name)]
    if not reaching or (len(reaching) > 1 and any(_asks(node, name) for node in own)):
        return None
    return reaching


def _set_to(node: ast.AST, name: str) -> list[ast.expr]:
    """Values that a plain assignment gives a name."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=annotated), value=value) if annotated == name and value is not None:
            return [value]
        case ast.Assign(targets=targets, value=value):
            found: list[ast.expr] = []
            for target in targets:
                match target, value:
                    case ast.Name(id=bound), _ if bound == name:
                        found.append(value)
                    case ast.Tuple(elts=left), ast.Tuple(elts=right):
                        is_plain = not any(isinstance(each, ast.Starred) for each in (*left, *right))
                        pairs = zip(left, right, strict=False) if is_plain else ()
                        found += [each for to, each in pairs if isinstance(to, ast.Name) and to.id == name]
            return found
    return []


def _asks(node: ast.AST, name: str) -> bool:
    """Whether a condition depends on a name: what its value is behind it may be known better than here."""
    match node:
        case ast.If(test=asked) | ast.IfExp(test=asked) | ast.While(test=asked) | ast.Assert(test=asked):
            pass
        case ast.Match(subject=asked) | ast.UnaryOp(op=ast.Not(), operand=asked):
            pass
        case (ast.Compare() as asked) | (ast.BoolOp() as asked):
            pass
        case _:
            return False
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(asked))


def _sets(statement: ast.stmt, name: str) -> bool:
    """Whether what follows a statement, if anything does, finds a name set by it."""
    match statement:
        case ast.Return() | ast.Raise():
            return True
        case ast.If(body=body, orelse=orelse):
            return _block_sets(body, name) and _block_sets(orelse, name)
        case ast.For(body=body, orelse=orelse) | ast.AsyncFor(body=body, orelse=orelse):
            return _block_sets(orelse, name) and _sets_before_break(body, name)
        case ast.While(body=body, orelse=orelse):
            return _block_sets(orelse, name) and _sets_before_break(body, name)
        case ast.Try(body=body, orelse=orelse) | ast.TryStar(body=body, orelse=orelse):
            blocks = [[*body, *orelse], *(handler.body for handler in statement.handlers)]
            return _block_sets(statement.finalbody, name) or all(_block_sets(block, name) for block in blocks)
        case ast.Match(cases=[*_, ast.match_case(pattern=ast.MatchAs(pattern=None), guard=None)]):
            return all(_block_sets(case.body, name) for case in statement.cases)
    return bool(_set_to(statement, name))


def _block_sets(block: Sequence[ast.stmt], name: str) -> bool:
    return any(_sets(statement, name) for statement in block)


def _sets_before_break(block: Sequence[ast.stmt], name: str) -> bool:
    """Whether each ``break`` of a loop that stands in a block of it comes behind what sets a name in that round."""
    for statement in block:
        if isinstance(statement, ast.Break) or not all(_sets_before_break(each, name) for each in _blocks(statement)):
            return False
        if _sets(statement, name):
            return True
    return True


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Those of a statement whose ``break`` is that of the loop around it."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return []
        case ast.For(orelse=orelse) | ast.AsyncFor(orelse=orelse) | ast.While(orelse=orelse):
            return [orelse]
    inside = [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    found = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    return [*found, *(each.body for each in inside)]
