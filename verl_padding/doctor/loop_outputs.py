"""What an agent loop of the user's own makes its outputs of, read from its source: fields that a step ends without."""

from __future__ import annotations

import ast
from collections.abc import Iterator

OUTPUT, BASE = "AgentLoopOutput", "AgentLoopBase"
WRITTEN = {
    "num_turns": "num_turns=2",
    "extra_fields": "extra_fields=dict(answer.extra_fields), which says by which weights the answer was made",
    "metrics": "metrics={}",
}
"""Field -> how it is given; any other is given by its name."""
READ_LATER = {
    "num_turns": (ast.Store,),  # verl passes on only fields that were set, and its trainer's metrics read this one
    "extra_fields": (ast.Store, ast.Load),  # of it, min_global_steps; what is put into it later is passed on
}
"""Fields with a default that verl's trainer cannot do without -> uses of an attribute that may set it."""


def fields_left_out(module: ast.Module, loop: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Fields that a loop gives some of its outputs none of.

    Yields:
        The name of the field, and whether it is certain that all its outputs lack it.
    """
    nodes = list(ast.walk(module))
    if not _is_of_verl(nodes, OUTPUT):
        return
    calls, own = _calls(nodes), _calls(list(ast.walk(loop)))
    makes_all = _extends_base_alone(module, loop, set()) and not any(map(_gets_more, calls))
    for field in (*_required(), *READ_LATER):
        lacking = [call for call in own if not _gets_more(call) and field not in _given(call)]
        if lacking and not _may_be_set_later(nodes, field):
            yield field, makes_all and all(field not in _given(call) for call in calls)


def _required() -> list[str]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    return [name for name, described in AgentLoopOutput.model_fields.items() if described.is_required()]


def _is_of_verl(nodes: list[ast.AST], name: str) -> bool:
    """Whether a name is verl's own in a file, which binds it once."""
    bound = []
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(origin)) if any(name == (each.asname or each.name) for each in node.names):
                bound.append(origin.startswith("verl."))
            case ast.Name(id=other, ctx=ast.Store()) | ast.ClassDef(name=other) | ast.FunctionDef(name=other):
                bound += [False] if other == name else []
    return bound == [True]


def _calls(nodes: list[ast.AST]) -> list[ast.Call]:
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == OUTPUT]


def _given(call: ast.Call) -> set[str | None]:
    """Fields of an output, without `extra_fields` that certainly have nothing of the server's."""
    return {each.arg for each in call.keywords if each.arg != "extra_fields" or not _lacks_weights(each.value)}


def _lacks_weights(extra: ast.expr) -> bool:
    if not isinstance(extra, ast.Dict):
        return False
    keys = [key.value if isinstance(key, ast.Constant) else None for key in extra.keys]
    return None not in keys and "min_global_steps" not in keys


def _gets_more(call: ast.Call) -> bool:
    """Whether it is given what its line does not tell."""
    return None in _given(call)


def _extends_base_alone(module: ast.Module, loop: ast.ClassDef, seen: set[str]) -> bool:
    """Whether nothing that a loop extends makes outputs elsewhere than in its own file."""
    there = {node.name: node for node in module.body if isinstance(node, ast.ClassDef) and node.name not in seen}
    seen = {*seen, loop.name}
    names = [base.id if isinstance(base, ast.Name) else "" for base in loop.bases]
    return all(name == BASE or (name in there and _extends_base_alone(module, there[name], seen)) for name in names)


def _may_be_set_later(nodes: list[ast.AST], field: str) -> bool:
    uses = READ_LATER.get(field, ())
    for node in nodes:
        match node:
            case ast.Attribute(attr=attribute) if attribute == field and isinstance(node.ctx, uses):
                return True
            case ast.Constant(value=value) if uses and value == field:
                return True
            case ast.Attribute(attr="model_copy" | "model_validate" | "model_construct") if uses:
                return True
    return False
