"""Every refusal of the plug-in, found in the source, so that a new one is met by the tests of all of them."""

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_padding import errors
from verl_padding.errors import PaddingError
from verl_padding.plan import errors as plan_errors

PACKAGE = Path(errors.__file__).parent
ROOTS = (PaddingError, plan_errors.PlanError)
CLASSES = {
    name
    for module in (errors, plan_errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, ROOTS)
}
CLASSES |= {
    node.name
    for path in PACKAGE.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef) and any(isinstance(base, ast.Name) and base.id in CLASSES for base in node.bases)
}
BUILT_IN = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}
INVARIANTS = {"AssertionError", "AttributeError", "KeyboardInterrupt"}
"""What is raised at nobody: by our own checks, for Python's protocols, and to interrupt a thread."""

VALUE = "<>"
"""What stands for a value that is put into a message."""


@dataclass(frozen=True)
class Refusal:
    place: str
    """File of the package and line."""
    kind: str
    """Name of the exception, or ``doctor``, or ``exit``."""
    message: str
    """With ``{expression}`` where a value is put in."""
    shown: str
    """As a user sees it, after the name of the exception, with :data:`VALUE` where a value is put in."""

    @property
    def carries_another(self) -> bool:
        """Whether it has no words of its own."""
        return not re.search("[a-z]{3}", self.message_of_its_own.replace(VALUE, ""))

    @property
    def message_of_its_own(self) -> str:
        return self.shown.removeprefix(f"{self.kind}: ").removeprefix("verl_padding: ")


def with_values_out(text: str) -> str:
    """A text with :data:`VALUE` for what stands in angle brackets."""
    return re.sub(r"<[^<>]*>", VALUE, text)


def messages_of(node: ast.expr, put_in: Callable[[ast.expr], str]) -> list[str]:
    """The message that an expression makes, or each of several where a condition chooses."""
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.JoinedStr():
            return ["".join(message for part in node.values for message in messages_of(part, put_in))]
        case ast.FormattedValue():
            return [put_in(node.value)]
        case ast.BinOp(op=ast.Add()):
            ends = messages_of(node.right, put_in)
            return [begin + end for begin in messages_of(node.left, put_in) for end in ends]
        case ast.IfExp():
            return [*messages_of(node.body, put_in), *messages_of(node.orelse, put_in)]
    return [put_in(node)]


def _told(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """(kind, message) where a module makes an exception of ours, raises another, has the doctor speak, or exits."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in CLASSES:
                yield name, node.args[0]
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) as call) if name in BUILT_IN - INVARIANTS:
                yield name, call.args[0]
            case ast.Call(func=ast.Name(id="wrong" | "warning"), args=[_, told], keywords=[]):  # others quote an error
                yield "doctor", told
            case ast.Call(func=ast.Attribute(value=ast.Name(id="sys"), attr="exit"), args=[ast.JoinedStr() as told]):
                yield "exit", told
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="sys"), attr="exit"), args=[ast.Constant(value=str()) as told]
            ):
                yield "exit", told


def refusals() -> list[Refusal]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for kind, node in _told(path):
            told = messages_of(node, lambda put_in: "{" + ast.unparse(put_in) + "}")
            shown = messages_of(node, lambda put_in: VALUE)
            for message, seen in zip(told, shown, strict=True):
                found.append(Refusal(f"{place}:{node.lineno}", kind, message, f"{kind}: {with_values_out(seen)}"))
    return found


REFUSALS = refusals()
