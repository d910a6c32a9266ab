"""Writes the parts of docs/reference.md that are made from code.

    python docs/generate.py

Settings come from ``verl_padding.config.PaddingConfig``, commands from the command line itself, and
names from docstrings, so that the page cannot say something else; a test compares them.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path[:0] = [str(Path(__file__).parent.parent)]

from typer import Context  # noqa: E402
from typer.main import get_command  # noqa: E402

from benchmarks.results_page import with_part  # noqa: E402
from verl_padding.cli import app as commands  # noqa: E402
from verl_padding.config import PaddingConfig  # noqa: E402

PAGE = Path(__file__).parent / "reference.md"
API = Path(__file__).parent / "api.rst.inc"
"""What the site's part on Python is made from, by autodoc."""
COMMAND = "verl-padding"
AUTODOC = re.compile(r"^\.\. auto(?:class|function|data):: (?P<name>[\w.]+)", re.MULTILINE)


def one_line(text: str) -> str:
    """A docstring, or a help text, in one line of Markdown."""
    line = " ".join(inspect.cleandoc(text).split()).replace("``", "`")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)


def meanings(config: type) -> dict[str, str]:
    """The docstring below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value.value, str)
            found[field.target.id] = one_line(text.value.value)
    return found


def choices(hint: Any) -> str:
    """What a field takes, by its type, in Markdown.

    >>> choices(int | Literal["auto"])
    'a whole number, `auto`'
    """
    plain = {int: "a whole number", str: "a text", bool: "`true`, `false`", type(None): "`null`"}
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is Mapping:
        return "name: kind"
    assert get_args(hint), f"a field of type {hint}: say here what it takes"
    return ", ".join(choices(part) for part in get_args(hint))


def default_of(field: Any) -> str:
    """The default of a field as it is written on a command line."""
    value = field.default_factory() if field.default is MISSING else field.default
    if value == {}:
        return "none"
    as_written = {None: "null", True: "true", False: "false"}
    # 0 and 1 are keys of that table, too.
    return f"`{as_written[value] if value is None or isinstance(value, bool) else value}`"


def settings() -> str:
    """The settings, one a line. Raises a KeyError for a field without a docstring."""
    hints, meaning = get_type_hints(PaddingConfig), meanings(PaddingConfig)
    lines = []
    for field in fields(PaddingConfig):
        name = field.name
        takes = choices(hints[name])
        # Here, and nowhere else, the version of the checkout would have to be written anew.
        default = "`verl_padding`'s own" if name == "version" else default_of(field)
        lines.append(f"- `padding.{name}` (default {default}; takes {takes}): {meaning[name]}")
    return "\n".join(lines) + "\n"


def command_lines() -> Iterator[str]:
    """Each command: how it is called, what it does, and its options."""
    group = get_command(commands.app)
    for name in group.list_commands(Context(group)):
        command = group.get_command(Context(group), name)
        if command.hidden:
            continue
        usage = " ".join(command.collect_usage_pieces(Context(command)))
        yield f"**`$ {COMMAND} {name} {usage}`** {one_line(command.help)}\n"
        for option in command.params:
            if getattr(option, "hidden", False) or option.name == "help":
                continue
            shown = max(option.opts, key=len)
            argument = option.param_type_name == "argument"
            named = (option.metavar or shown).strip("{}[]") if argument else shown
            default = option.default
            is_flag = default is None or isinstance(default, bool)
            value = "" if is_flag or argument else f" (`{default}`)"
            yield f"- `{named}`{value}: {one_line(option.help)}"
        yield ""


def names() -> str:
    """The names that a program may import, with the first sentence of what each is."""
    lines = []
    for match in AUTODOC.finditer(API.read_text()):
        module, _, name = match["name"].rpartition(".")
        value = getattr(import_module(module), name)
        text = inspect.getdoc(value) if callable(value) else None
        if text and not text.startswith(f"{name}("):  # which is the signature of a dataclass
            first = re.split(r"(?<=[.:;])\s", one_line(text))[0].rstrip(":.;")
            lines.append(f"- `{match['name']}`: {first}.")
    return "\n".join(lines) + "\n"


def parts() -> dict[str, str]:
    """Name -> text of each generated part of the page."""
    return {"settings": settings(), "commands": "\n".join(command_lines()), "names": names()}


if __name__ == "__main__":
    page = PAGE.read_text()
    for part, text in parts().items():
        page = with_part(page, part, text)
    PAGE.write_text(page)
