"""What Python certainly runs of a user's code, whatever its values are: what stands below no condition."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from verl_padding.doctor.bound_names import Function
from verl_padding.doctor.signatures import method


def nodes_run_by(owner: ast.ClassDef, first: str) -> Iterator[tuple[str, list[ast.AST]]]:
    """(name, what is certainly run) of a method, and of all those of ``self`` that it certainly calls in turn.

    Loops are taken to have a round. Of a method that the class does not define itself, nothing is known.
    """
    waiting, seen = [first], {first}
    while waiting:
        name = waiting.pop()
        function = method(owner, name)
        nodes = list(certain_nodes(function.body, deep=True)) if function else []
        yield name, nodes
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=called)) if called not in seen:
                    seen.add(called)
                    waiting.append(called)


def certain_nodes(body: Sequence[ast.stmt], *, deep: bool = False) -> Iterator[ast.AST]:
    """All that is run of the body of a module or function, in its order, if nothing before it raises an error.

    Args:
        deep: with the bodies of loops, which are taken to have a round, and of ``with``, which may catch an error.
    """
    for statement in body:
        yield from _of_statement(statement, deep)
        if _may_leave(statement):
            return


def _of_statement(statement: ast.stmt, deep: bool) -> Iterator[ast.AST]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for each in (*statement.decorator_list, *statement.args.defaults, *statement.args.kw_defaults):
                yield from _of_expression(each)
        case ast.ClassDef():
            for each in (*statement.decorator_list, *statement.bases):
                yield from _of_expression(each)
            yield from certain_nodes(statement.body, deep=deep)
        case ast.If(test=first) | ast.Match(subject=first):
            yield from _of_expression(first)
        case ast.For(iter=first, body=body) | ast.AsyncFor(iter=first, body=body) | ast.While(test=first, body=body):
            yield from _of_expression(first)
            yield from certain_nodes(body, deep=deep) if deep else ()
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            for item in items:
                yield from _of_expression(item.context_expr)
            yield from certain_nodes(body, deep=deep) if deep else ()
        case ast.Assert(test=first):  # its message is made only where it fails
            yield from _of_expression(first)
        case ast.Try() | ast.TryStar():
            return
        case _:
            yield statement
            for part in ast.iter_child_nodes(statement):
                yield from _of_expression(part)


def _of_expression(expression: ast.AST | None) -> Iterator[ast.AST]:
    if expression is None:
        return
    yield expression
    match expression:
        case ast.IfExp(test=first) | ast.BoolOp(values=[first, *_]):
            parts: Sequence[ast.AST] = [first]
        case ast.Compare(left=left, comparators=[first, *_]):  # a chain ends early
            parts = [left, first]
        case ast.Lambda():
            parts = []
        case ast.ListComp(generators=[first, *_]) | ast.SetComp(generators=[first, *_]):
            parts = [first.iter]
        case ast.DictComp(generators=[first, *_]) | ast.GeneratorExp(generators=[first, *_]):
            parts = [first.iter]
        case _:
            parts = list(ast.iter_child_nodes(expression))
    for part in parts:
        yield from _of_expression(part)


def _may_leave(node: ast.AST) -> bool:
    """Whether what follows a statement may be left out, other than by an error."""
    if isinstance(node, Function | ast.ClassDef | ast.Lambda):
        return False
    leaves = ast.Return | ast.Raise | ast.Break | ast.Continue
    return isinstance(node, leaves) or any(map(_may_leave, ast.iter_child_nodes(node)))
