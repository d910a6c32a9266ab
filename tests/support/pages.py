"""The pages of the documentation, as a reader sees them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]

FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>.*?)\n(?P<code>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE
)
COMMENT = re.compile(r"^%.*$", re.MULTILINE)


def read(page):
    """The text of a page as a reader sees it."""
    return COMMENT.sub("", page.read_text())


OWN_RECIPE = "Train your own agent"
"""The section of docs/quickstart.md that copies a recipe and runs it."""


def section(page, heading):
    """A section of a page's text, up to the next heading of its level or above."""
    (start,) = re.finditer(rf"^(#+) {re.escape(heading)}\n", page, re.MULTILINE)
    code = [match.span() for match in FENCE.finditer(page)]
    for end in re.finditer(rf"^#{{1,{len(start[1])}}} ", page, re.MULTILINE):
        in_code = any(first <= end.start() < last for first, last in code)
        if end.start() > start.end() and not in_code:
            return page[start.end() : end.start()]
    return page[start.end() :]


def commands_of(text):
    """Blocks of commands of a page's text, in order."""
    return [match["code"] for match in FENCE.finditer(text) if match["language"] == "bash"]


def own_recipe_text():
    """What the quickstart says of the recipe to copy."""
    return section(read(DOCS / "quickstart.md"), OWN_RECIPE)


def make_own_recipe(place):
    """Copies the quickstart's recipe, as the page does, and has its script make model and data;
    returns the folder."""
    copy, *_ = commands_of(own_recipe_text())
    (place / "recipes").symlink_to(ROOT / "recipes")
    subprocess.run(["/bin/bash", "-euo", "pipefail", "-c", copy], cwd=place, check=True)
    job_of(place / "guess/run_cpu.sh")
    return place / "guess"


def job_of(script, **environment):
    """The overrides that a script gives to the doctor and to verl's trainer, with what it makes for
    them made."""
    before, _, after = script.read_text().partition('verl-padding doctor "${job[@]}"\n')
    assert 'python -m verl.trainer.main_ppo "${job[@]}" ' in after
    code = before + "printf '%s\\n' :job \"${job[@]}\""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["/bin/bash", "-c", code],
        cwd=script.parent,
        env=os.environ | {"PATH": path} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return shown.rpartition(":job\n")[2].splitlines()
