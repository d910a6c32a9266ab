"""The folder that docs/own_recipe.md builds, by the page's own files and commands."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pages import DOCS, commands_of, files_of

PAGE = DOCS / "own_recipe.md"
FOLDER = "guess"


def make_own_recipe(place: Path) -> Path:
    """Writes the page's files and runs its commands up to the job, in ``place``; returns the folder they have made."""
    make_folder, make_data, *_ = commands_of(PAGE)
    _run(make_folder, place)
    folder = place / FOLDER
    for name, text in files_of(PAGE).items():
        (folder / name).write_text(text)
    _run(make_data, folder)
    return folder


def _run(commands: str, folder: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["/bin/bash", "-euo", "pipefail", "-c", commands], cwd=folder, env=environment, check=True)
