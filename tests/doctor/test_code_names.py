"""What a module defines, by its text."""

import importlib
import sys

import pytest

from verl_padding.doctor.code_names import defined_in, find_module

RAISES = "raise AssertionError('it was run')\n"


def test_names_of_branches_and_imports_count_and_those_of_functions_do_not(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os.path\nfrom a import b as c\nd: int = 1\n{RAISES}"
        "try:\n    e, f = 1, 2\nexcept E:\n    pass\n"
        "if True:\n    async def g():\n        h = 1\n"
    )
    assert sorted(defined_in(file)) == ["c", "d", "e", "f", "g", "os"]


@pytest.mark.parametrize("text", ["from a import *\n", "def __getattr__(name): ...\n"])
def test_what_only_running_a_module_would_tell_is_not_guessed(text, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert defined_in(file) is None


def test_a_module_is_found_and_no_package_above_it_is_run(tmp_path, monkeypatch):
    package = tmp_path / "package_of_mine" / "below"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text(RAISES)
    (package / "code.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_module("package_of_mine.below.code") == package / "code.py"
    assert find_module("package_of_mine.below.cod") is None
    assert find_module("no_package.code") is None
    assert find_module("verl_padding.doctor") is not None
    assert "package_of_mine" not in sys.modules


def test_modules_of_an_imported_package_are_those_of_its_path(tmp_path, monkeypatch):
    copy = tmp_path / "copy" / "code.py"
    copy.parent.mkdir()
    copy.touch()
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "package_of_mine", raising=False)
    package = importlib.import_module("package_of_mine")
    package.__path__.append(str(copy.parent))
    assert find_module("package_of_mine.code") == copy


def test_a_file_is_read_in_the_coding_that_it_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_bytes("# coding: latin-1\ndef f():\n    return 'é'\n".encode("latin-1"))
    assert defined_in(file) == ["f"]
