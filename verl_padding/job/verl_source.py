"""verl's source as text: what it says is known before verl, torch or Ray is imported."""

import ast
import re
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class VerlSource:
    """A tree of verl's source. Files are named from its root, definitions by their dotted names in
    a file."""

    def __init__(self, root: Path):
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}

    @property
    def version(self) -> str:
        return (self.root / "version/version").read_text().strip()

    def module(self, file: str) -> ast.Module | None:
        """A file's syntax tree; None if there is no such file, or it is no Python."""
        if file not in self._modules:
            path = self.root / file
            self._modules[file] = None
            with suppress(FileNotFoundError, SyntaxError):
                self._modules[file] = ast.parse(path.read_text())
        return self._modules[file]

    def code(self, file: str, name: str) -> str | None:
        """The code of a definition as ``ast.unparse`` writes it, without its docstring; None if it
        is not there."""
        node: ast.Module | Definition | None = self.module(file)
        for part in name.split("."):
            inside = node.body if node is not None else []
            found = [each for each in inside if isinstance(each, Definition) and each.name == part]
            node = found[-1] if found else None
        if node is None:
            return None
        body = node.body if ast.get_docstring(node) is None else node.body[1:]
        return "\n".join(map(ast.unparse, body))

    def lacks(self, file: str, name: str, pieces: tuple[str, ...]) -> str:
        """What a definition does not have of some pieces of code; empty if it has all."""
        if (code := self.code(file, name)) is None:
            return "is not there"
        lacking = [piece for piece in pieces if not re.search(_whole(piece), code)]
        return f"has no {', '.join(lacking)}" if lacking else ""


def _whole(piece: str) -> str:
    """A pattern of a piece of code that is not part of a longer name.

    >>> bool(re.search(_whole("step("), "self.step(batch)"))
    False
    """
    return rf"(?<![\w.]){re.escape(piece)}" + (r"(?!\w)" if piece[-1].isidentifier() else "")


@cache
def installed_verl() -> VerlSource:
    """The verl that this process would import."""
    origin = getattr(find_spec("verl"), "origin", None)
    assert origin, "verl is not installed"
    return VerlSource(Path(origin).parent)
