"""What an agent loop of the user's own makes its outputs of, read from its source: what a step ends for."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache

from verl_padding.doctor.bound_names import Function, names_bound
from verl_padding.doctor.certain_code import nodes_run_by

OUTPUT, BASE = "AgentLoopOutput", "AgentLoopBase"
APPLY = "self.tokenizer.apply_chat_template"
TAKE_IDS = (OUTPUT, "self.server_manager.generate")
WRITTEN = {
    "num_turns": "num_turns=2",
    "extra_fields": "extra_fields=dict(answer.extra_fields), which says by which weights the answer was made",
    "metrics": "metrics={}",
    "response_logprobs": "response_logprobs=answer.log_probs, one for each of response_ids",
}
"""Field -> how it is given; any other is given by its name."""
READ_LATER = {
    "num_turns": (ast.Store,),  # verl passes on only fields that were set, and its trainer's metrics read this one
    "extra_fields": (ast.Store, ast.Load),  # of it, min_global_steps; what is put into it later is passed on
    "response_logprobs": (ast.Store,),
}
"""Fields with a default that verl's trainer cannot do without -> uses of an attribute that may set it."""


def fields_left_out(module: ast.Module, loop: ast.ClassDef, *, log_probs: bool) -> Iterator[tuple[str, bool]]:
    """Fields that a loop gives some of its outputs none of.

    Args:
        log_probs: whether verl's trainer reads those of the rollout.

    Yields:
        The name of the field, and whether it is certain that all its outputs lack it.
    """
    nodes = list(ast.walk(module))
    if not _is_of_verl(nodes, OUTPUT):
        return
    calls, own = _calls(nodes), _calls(list(ast.walk(loop)))
    makes_all = _extends_base_alone(module, loop, set()) and not any(map(_gets_more, calls))
    for field in (*_required(), *READ_LATER):
        if field == "response_logprobs" and not log_probs:
            continue
        lacking = [call for call in own if not _gets_more(call) and field not in _given(call)]
        if lacking and not _may_be_set_later(nodes, field):
            yield field, makes_all and all(field not in _given(call) for call in calls)


def encodings_as_ids(loop: ast.ClassDef) -> Iterator[tuple[int, bool]]:
    """Where a loop gives what transformers makes of a chat template, a mapping, as the token ids of a prompt.

    Yields:
        The line, and whether it is certainly run.
    """
    replaces = any(
        isinstance(node, ast.Attribute) and node.attr == "tokenizer" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(loop)
    )
    if replaces or not _gives_mappings():
        return
    certain = {id(node) for _, nodes in nodes_run_by(loop, "run") for node in nodes}
    for function in ast.walk(loop):
        made = {name for name, value in _set_once(function).items() if _is_encoding(value)} - _looked_into(function)
        for node in ast.walk(function) if isinstance(function, Function) else ():
            match node:
                case ast.Call(func=called, keywords=keywords) if ast.unparse(called) in TAKE_IDS:
                    for keyword in keywords:
                        value = keyword.value
                        is_made = isinstance(value, ast.Name) and value.id in made
                        if keyword.arg == "prompt_ids" and (is_made or _is_encoding(value)):
                            yield value.lineno, id(node) in certain


@cache
def _gives_mappings() -> bool:
    """Whether the installed transformers gives a mapping where nothing else is asked for, as of its version 5."""
    from transformers import PreTrainedTokenizerBase

    asked = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return all(asked[name].default is True for name in ("return_dict", "tokenize"))


def _set_once(function: ast.AST) -> dict[str, ast.expr]:
    """Names that a function sets in one place, to a value in plain sight."""
    bound = [name for node in ast.walk(function) for name in names_bound(node)]
    found = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if bound.count(name) == 1:
                found[name] = value
    return found


def _looked_into(function: ast.AST) -> set[str]:
    """Names that a function takes something of, or asks what they are: code for several versions of transformers."""
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id=name)) | ast.Attribute(value=ast.Name(id=name)):
                found.add(name)
            case ast.Call(func=ast.Name(id="isinstance" | "hasattr"), args=[ast.Name(id=name), *_]):
                found.add(name)
    return found


def _is_encoding(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=called, args=[_], keywords=keywords) if ast.unparse(called) == APPLY:
            given = {each.arg: ast.unparse(each.value) for each in keywords}
            return None not in given and all(given.get(name, "True") == "True" for name in ("tokenize", "return_dict"))
    return False


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
