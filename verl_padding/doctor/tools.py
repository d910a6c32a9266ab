"""The tools that a job gives to its agents: there, and with a schema. None is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.bound_names import Function
from verl_padding.doctor.entries import entries_of, refuse_bad_entry, resolved
from verl_padding.doctor.finding import Finding, ok, wrong
from verl_padding.doctor.named_objects import parsed, refuse_missing_imports

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
REGISTERS = "function_tool"
"""verl's decorator of a function that is a tool."""


def tools_of_job(config: DictConfig) -> Iterator[Finding]:
    """The functions of a file, and the classes of a YAML file."""
    setting = f"{MULTI_TURN}.function_tool_path"
    if path := OmegaConf.select(config, setting):
        try:
            _refuse_bad_functions(Path(resolved(path) or path))
        except LookupError as problem:
            yield wrong(setting, f"{path}: {problem}. Correct the setting, or the file.")
        else:
            yield ok(setting, path)
    setting = f"{MULTI_TURN}.tool_config_path"
    if path := OmegaConf.select(config, setting):
        try:
            content = entries_of(path)
            if not isinstance(content, DictConfig):
                raise LookupError("a mapping with the key `tools` is needed")
            entries = content.get("tools") or ()
            if isinstance(entries, str | int | float | DictConfig):
                raise LookupError("its key tools holds no list")
            for entry in entries:
                refuse_bad_entry(entry, "class_name", needed=("class_name", "config"))
                _refuse_bad_tool(entry)
        except LookupError as problem:
            yield wrong(setting, f"{path}: {problem}. Correct the setting, or the file.")
        else:
            yield ok(setting, f"{path} ({', '.join(str(entry.class_name).rpartition('.')[2] for entry in entries)})")


def _refuse_bad_tool(entry: DictConfig) -> None:
    """As verl's ``initialize_tools_from_config`` reads it.

    Raises:
        LookupError: its kind or its schema is none of verl's, with a sentence.
    """
    from pydantic import ValidationError
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.tools.tool_registry import ToolType

    kinds = [kind.value for kind in ToolType]
    kind = OmegaConf.select(entry, "config.type")
    if kind not in kinds:
        raise LookupError(f"{entry.class_name}: config.type is {kind}, but verl has tools of type {', '.join(kinds)}")
    if entry.get("tool_schema") is not None:
        try:
            OpenAIFunctionToolSchema.model_validate(OmegaConf.to_container(entry.tool_schema, resolve=True))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("tool_schema", *first["loc"])))
            raise LookupError(f"{entry.class_name}: {where} is no schema of a tool ({first['msg']})") from error


def _refuse_bad_functions(source: Path) -> None:
    """As verl's ``load_function_tools_from_path`` reads them: it makes a schema of hints and docstring.

    Raises:
        LookupError: verl cannot make tools of the file's functions, with a sentence.
    """
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    if not source.is_file():
        raise LookupError("there is no such file")
    refuse_missing_imports(source)
    for node in parsed(source).body:
        if not isinstance(node, Function) or [_registers_as_is(each) for each in node.decorator_list] != [True]:
            continue  # another decorator may change what it takes
        takes = node.args
        if takes.vararg or takes.kwarg:
            raise LookupError(f"{node.name}() takes * or **, which no schema of a tool can say")
        docs = ast.get_docstring(node)
        if not docs:
            raise LookupError(f"{node.name}() has no docstring, and verl makes the schema of the tool from it")
        for each in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs):
            if each.annotation is None:
                raise LookupError(f"{node.name}(): its argument {each.arg!r} has no type, and the schema needs one")
            if each.arg not in (parse_google_format_docstring(docs.strip())[1] or {}):
                raise LookupError(
                    f"{node.name}(): its docstring does not say what the argument {each.arg!r} is, in a line "
                    f"`{each.arg}: ..` below `Args:`"
                )


def _registers_as_is(decorator: ast.expr) -> bool:
    """Whether it is verl's decorator, and gives no schema."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(decorator, ast.Call) and any(keyword.arg in (None, "schema") for keyword in decorator.keywords):
        return False
    return getattr(called, "id", getattr(called, "attr", None)) == REGISTERS
