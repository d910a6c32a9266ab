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


def files_of(page: Path) -> dict[str, str]:
    """Name -> text of the files that a page prints: blocks whose first line is a comment with a
    name."""
    blocks = [match["code"] for match in FENCE.finditer(read(page))]
    return {named["name"]: code for code in blocks if (named := FILE_NAME.match(code))}


def commands_of(page: Path) -> list[str]:
    """Blocks of commands of a page, in order, without those that are files."""
    blocks = [match["code"] for match in FENCE.finditer(read(page)) if match["language"] == "bash"]
    return [code for code in blocks if not FILE_NAME.match(code)]


def make_own_recipe(place: Path) -> Path:
    """Writes the files of docs/own_recipe.md and runs its commands up to the job, in ``place``;
    returns the folder."""
    page, folder = DOCS / "own_recipe.md", place / "guess"
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
