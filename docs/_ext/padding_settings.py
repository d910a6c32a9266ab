"""The directive ``padding-settings``: a table of the settings, made from the typed config as the
site is built.

Names, choices, defaults and meanings are those of ``verl_padding.config.PaddingConfig`` itself, so
that no page can say something else.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from verl_padding.config import PaddingConfig, choices_by_setting


def meanings(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, in one line and in Markdown."""
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
            found[field.target.id] = " ".join(inspect.cleandoc(text.value.value).split()).replace(
                "``", "`"
            )
    return found


def choices(hint: Any) -> str:
    """What a field takes, by its type, in Markdown.

    >>> choices(int | Literal["auto"])
    'a whole number, `auto`'
    """
    if hint is int:
        return "a whole number"
    if hint is str:
        return "a text"
    if hint is bool:
        return "`true`, `false`"
    if hint is type(None):
        return "`null`"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is Mapping:
        return "name: role"
    assert get_args(hint), f"a field of type {hint}: say here what it takes"
    return ", ".join(choices(part) for part in get_args(hint))


def default_of(field: Any) -> str:
    """The default of a field as it is written on a command line."""
    value = field.default_factory() if field.default is MISSING else field.default
    if value == {}:
        return "none"
    return (
        f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"
    )


def table() -> str:
    """The settings as a table in Markdown.

    Raises:
        KeyError: a field without a docstring.
    """
    listed = choices_by_setting()
    hints, meaning = get_type_hints(PaddingConfig), meanings(PaddingConfig)
    lines = ["| setting | default | choices | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(PaddingConfig):
        name = field.name
        takes = choices(Literal[listed[name]] if name in listed else hints[name])
        cells = (f"`padding.{name}`", default_of(field), takes, meaning[name])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class PaddingSettings(SphinxDirective):
    """Puts the table into a page, which is built again when the config has changed."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(inspect.getfile(PaddingConfig))
        return self.parse_text_to_nodes(table())


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx as it loads the extension."""
    app.add_directive("padding-settings", PaddingSettings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
