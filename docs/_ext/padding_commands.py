"""The directive ``padding-commands``: what each command of ``verl-padding`` takes, as its own
``--help`` has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

from verl_padding.cli import app as commands

NAME = "verl-padding"


def sections() -> Iterator[str]:
    """A section in Markdown for each command, made by typer."""
    group = get_command(commands.app)
    for name in group.list_commands(Context(group)):
        command = group.get_command(Context(group), name)
        yield get_docs_for_click(obj=command, ctx=Context(command), indent=1, call_prefix=NAME)


class PaddingCommands(SphinxDirective):
    """Puts the commands into a page, which is built again when they have changed."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(inspect.getfile(commands))
        return self.parse_text_to_nodes("\n".join(sections()), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx as it loads the extension."""
    app.add_directive("padding-commands", PaddingCommands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
