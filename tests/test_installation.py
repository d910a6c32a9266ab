"""A wheel has all that a checkout has."""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("verl_padding", "recipes", "configs")
ENTRY_POINTS = (
    "from importlib.metadata import entry_points as e; print([p.value for p in"
    " e(group='verl.plugins')])"
)


def files_in(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.parent.name != "__pycache__"
    }


@pytest.mark.slow
def test_what_is_installed_is_whole(tmp_path):
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder)
    for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")

    def run(*command: str) -> str:
        result = subprocess.run(
            [python, *command], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", str(source))
    installed = files_in(site)
    for part, target in (("verl_padding", ""), ("recipes", "recipes/"), ("configs", "configs/")):
        expected = {f"verl_padding/{target}{name}" for name in files_in(ROOT / part)}
        assert not expected - installed, "left out of the wheel: name it in setup.cfg"
    assert run("-c", ENTRY_POINTS) == "['verl_padding.plugin']"


def test_the_plug_in_is_found_in_a_folder_that_holds_a_checkout(tmp_path):
    """Python takes the checkout's folder, which has the package's name, for a package without an
    ``__init__``."""
    (tmp_path / "verl_padding").mkdir()
    code = (
        "import verl_padding.plugin, verl_padding.config as c, verl_padding.entry.import_hooks;"
        " print(c.__version__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == version("verl_padding")


COPIED = """
import sys, verl_padding.plugin, hydra, verl_padding.configs
import verl_padding.recipes.context_reset.job
print(*{m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "verl_padding"}, sep="\\n")
"""


@pytest.mark.parametrize("lacking", [None, "configs", "recipes"])
def test_a_copy_on_the_path_is_used_whole_or_refused(lacking, tmp_path):
    copy = tmp_path / "copy"
    for part in {*FOLDERS} - {lacking}:
        shutil.copytree(ROOT / part, copy / part)
    found = subprocess.run(
        [sys.executable, "-c", COPIED, "+padding=prompt"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    files = found.stdout.split()
    assert (found.returncode == 0) == (len(files) > 5) == (lacking is None), found.stderr
    assert [file for file in files if not file.startswith(str(copy))] == []
