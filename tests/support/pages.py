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
