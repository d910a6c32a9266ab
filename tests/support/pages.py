"""The pages of the documentation, as a reader sees them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>.*?)\n(?P<code>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"^%.*$", re.MULTILINE)


def read(page: Path) -> str:
    """The text of a page as a reader sees it."""
    return COMMENT.sub("", page.read_text())


FILE_NAME = re.compile(r"# (?P<name>\w+\.(?:py|sh|yaml))\n")


def files_of(page: Path) -> dict[str, str]:
    """Name -> text of the files that a page prints: blocks whose first line is a comment with a name."""
    blocks = [match["code"] for match in FENCE.finditer(read(page))]
    return {named["name"]: code for code in blocks if (named := FILE_NAME.match(code))}


def commands_of(page: Path) -> list[str]:
    """Blocks of commands of a page, in order, without those that are files."""
    blocks = [match["code"] for match in FENCE.finditer(read(page)) if match["language"] == "bash"]
    return [code for code in blocks if not FILE_NAME.match(code)]
