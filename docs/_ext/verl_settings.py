"""The directive ``verl-settings``: what the plan makes of each of verl's settings, from ``verl_settings.yaml``.

A test holds the file against verl's own config: no key of verl's is missing in it, and none is in it that verl lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

TABLE = Path(__file__).with_suffix(".yaml")
VERDICTS = {"plan": "read", "refused": "some values refused", "alike": "alike for all rows", "no": "not needed"}
"""Verdict of the file -> words of the page."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    under: tuple[str, ...]
    """Sections that have the keys, some or all of them."""
    keys: tuple[str, ...]
    verdict: str
    why: str
    by_class: bool
    """The keys are fields of verl's config classes that its YAML leaves out."""


def sections() -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of each table.

    Raises:
        KeyError: a row without keys, verdict or reason.
    """
    for section in yaml.safe_load(TABLE.read_text()):
        rows = [
            Row(tuple(section["under"]), tuple(row["keys"]), row["verdict"], row["why"], row.get("by_class", False))
            for row in section["rows"]
        ]
        yield section["title"], rows


def page() -> str:
    """All tables in Markdown."""
    lines = []
    for title, rows in sections():
        under = " and ".join(f"`{name}`" for name in rows[0].under if name)
        lines += [f"## {title}", "", *([f"Under {under}.", ""] if under else [])]
        lines += ["| setting | the plan | why |", "| --- | --- | --- |"]
        for row in rows:
            keys = ", ".join(f"`{key}`" for key in row.keys)
            lines.append(f"| {keys} | {VERDICTS[row.verdict]} | {row.why} |")
        lines.append("")
    return "\n".join(lines)


class VerlSettings(SphinxDirective):
    """Puts the tables into a page, which is built again when the file has changed."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(TABLE))
        return self.parse_text_to_nodes(page(), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx as it loads the extension."""
    app.add_directive("verl-settings", VerlSettings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
