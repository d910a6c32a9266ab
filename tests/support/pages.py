"""The pages of the documentation, as a reader sees them, and what building their site takes."""

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]

FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>.*?)\n(?P<code>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE
)
COMMENT = re.compile(r"^%.*$", re.MULTILINE)


def read(page: Path) -> str:
    """The text of a page as a reader sees it."""
    return COMMENT.sub("", page.read_text())


FILE_NAME = re.compile(r"# (?P<name>\w+\.(?:py|sh|yaml))\n")


def files_of(text: str) -> dict[str, str]:
    """Name -> text of the files that a page prints: blocks whose first line is a comment with a
    name."""
    blocks = [match["code"] for match in FENCE.finditer(text)]
    return {named["name"]: code for code in blocks if (named := FILE_NAME.match(code))}


OWN_RECIPE = "Train your own agent"
"""The section of docs/quickstart.md that builds a recipe in an empty folder."""


def section(page: str, heading: str) -> str:
    """A section of a page's text, up to the next heading of its level or above."""
    (start,) = re.finditer(rf"^(#+) {re.escape(heading)}\n", page, re.MULTILINE)
    code = [match.span() for match in FENCE.finditer(page)]
    for end in re.finditer(rf"^#{{1,{len(start[1])}}} ", page, re.MULTILINE):
        in_code = any(first <= end.start() < last for first, last in code)
        if end.start() > start.end() and not in_code:
            return page[start.end() : end.start()]
    return page[start.end() :]


def commands_of(text: str) -> list[str]:
    """Blocks of commands of a page's text, in order, without those that are files."""
    blocks = [match["code"] for match in FENCE.finditer(text) if match["language"] == "bash"]
    return [code for code in blocks if not FILE_NAME.match(code)]


def own_recipe_text() -> str:
    """What the quickstart says of a recipe from an empty folder."""
    return section(read(DOCS / "quickstart.md"), OWN_RECIPE)


def make_own_recipe(place: Path) -> Path:
    """Writes the files of the quickstart's recipe and runs its commands up to the job, in
    ``place``; returns the folder."""
    page, folder = own_recipe_text(), place / "guess"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    make_folder, make_data, *_ = (
        ["/bin/bash", "-euo", "pipefail", "-c", code] for code in commands_of(page)
    )
    subprocess.run(make_folder, cwd=place, env=environment, check=True)
    for name, text in files_of(page).items():
        (folder / name).write_text(text)
    subprocess.run(make_data, cwd=folder, env=environment, check=True)
    return folder


def skip_without_the_extra_docs() -> None:
    """Skips a test that builds the site where a package of the extra ``docs`` is not installed."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for requirement in setup["options.extras_require"]["docs"].split():
        try:
            distribution(Requirement(requirement).name)
        except PackageNotFoundError:
            pytest.skip(f"takes the extra `docs`: {requirement} is not installed")
