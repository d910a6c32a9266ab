"""Something that is so in verl's source, and that the plug-in relies on."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from verl_padding.job.verl_source import VerlSource


@dataclass(frozen=True, kw_only=True, eq=False)
class Fact:
    """Something that is so in verl's source."""

    without: str
    """What would happen in a job if it were not so."""
    needed_by: str = ""
    """Setting, from the config's root, that needs it if it is set; empty for the core."""
    engine: str = ""
    """Engines that need it, by the beginning of their strategy; empty for all."""
    is_silent: bool = True
    """Whether nothing else would say so."""

    def what_is_missing(self, source: VerlSource) -> str:
        """What is not so, with its place; empty if all is."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class Code(Fact):
    """A definition has some pieces of code, in the form of ``ast.unparse``."""

    file: str
    name: str
    code: tuple[str, ...]

    def what_is_missing(self, source: VerlSource) -> str:
        lacking = source.lacks(self.file, self.name, self.code)
        if lacking == [self.name]:
            return f"{self.file} has no {self.name}"
        return f"{self.name} in {self.file} has no {', '.join(lacking)}" if lacking else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClosedWorld(Fact):
    """All that verl has of a kind is known here."""

    kind: str
    found: Callable[[VerlSource], set[str]]
    known: Collection[str]
    needed: Collection[str] = ()
    """Those that have to be there."""
    is_choice: bool = False
    """Whether :attr:`needed_by` chooses one of them: a job needs that one to be known."""

    def what_is_missing(self, source: VerlSource) -> str:
        new = sorted(self.unknown(source))
        gone = sorted({*self.needed} - self.found(source))
        said = {f"{', '.join(new)} among the {self.kind}": new, f"no {', '.join(gone)}": gone}
        return " and ".join(text for text, names in said.items() if names)

    def unknown(self, source: VerlSource) -> set[str]:
        """Names that are not known here."""
        return self.found(source) - {*self.known}
