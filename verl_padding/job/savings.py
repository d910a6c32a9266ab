"""Which savings a job has, that change none of its results, and what keeps the others off.

All that refuses a saving gives an ``Incompatibility`` to :meth:`Savings.block`. A saving that the
job asks for is refused there; one that is ``auto`` stays off, and the incompatibility is shown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_padding.config import AUTO, PaddingConfig
from verl_padding.errors import Incompatibility, PaddingConfigError
from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR

PACKER, SHARING = "packer", "sharing"
ZERO_ADVANTAGE_ROWS, OLD_LOG_PROBS = "zero_advantage_rows", "recompute_old_log_probs"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A setting with which a job computes less, or waits less."""

    on: str | bool
    what: str
    """What is saved, or how."""


SAVINGS = {
    PACKER: Saving(on="plan", what="micro-batches by the plan"),
    SHARING: Saving(on="on", what="shared tokens computed once"),
    ZERO_ADVANTAGE_ROWS: Saving(on="skip", what="update without zero-advantage rows"),
    OLD_LOG_PROBS: Saving(on=False, what="no pass for old log-probs"),
}
"""Setting below ``padding`` -> the saving; one that needs another comes after it."""


class Savings:
    """The savings of a job. Each that is ``auto`` is on until something blocks it."""

    def __init__(self, padding: PaddingConfig):
        self._values: dict[str, Any] = {name: getattr(padding, name) for name in SAVINGS}
        self.incompatibilities: dict[str, list[Incompatibility]] = {name: [] for name in SAVINGS}
        """What keeps each off, or would if it were asked for."""
        self.limits: dict[str, str] = {}
        """What keeps a saving from saving all that it might."""

    def is_on(self, name: str) -> bool:
        """Whether the job has this saving, as far as is known by now."""
        return self._values[name] in (AUTO, SAVINGS[name].on) and not self.incompatibilities[name]

    @property
    def on(self) -> list[str]:
        """The savings that the job has."""
        return [name for name in SAVINGS if self.is_on(name)]

    def block(self, name: str, incompatibilities: Iterable[Incompatibility]) -> None:
        """Turns a saving off; a PaddingConfigError if the job asks for it."""
        # "auto" gives way, and says so in lines(); an explicit value ends the job.
        for incompatibility in incompatibilities:
            if self._values[name] == SAVINGS[name].on:
                raise PaddingConfigError(
                    f"padding.{name}={self._values[name]!r}: {incompatibility}"
                )
            if incompatibility not in self.incompatibilities[name]:
                self.incompatibilities[name].append(incompatibility)

    def block_unless_explicit(self, name: str, incompatibility: Incompatibility) -> None:
        """Turns off a saving that would have no effect, unless the job asks for it."""
        if self._values[name] != SAVINGS[name].on:
            self.block(name, [incompatibility])

    def lines(self) -> list[str]:
        """A line for each saving: on or off, by which settings, and what would have to change."""
        return [f"{saving.what}: {self._state(name)}" for name, saving in SAVINGS.items()]

    def _state(self, name: str) -> str:
        if self.is_on(name):
            limit = f", {self.limits[name]}" if name in self.limits else ""
            return f"on (padding.{name}={self._values[name]}){limit}"
        if self.incompatibilities[name]:
            return "off: " + " ".join(map(str, self.incompatibilities[name]))
        return f"off: padding.{name}={self._values[name]}. The job allows padding.{name}=auto."


def saved_line(totals: Mapping[str, float]) -> str:
    """What savings have left out, of the sums of a run's metrics over its steps; "" if nothing.

    >>> saved_line({"padding/computed_tokens/total": 60, "padding/saved/shared_tokens/total": 40})
    'saved 40 of 100 tokens (40%): 40 shared'
    """
    if names.ALL_COMPUTED_TOKENS not in totals:
        return ""
    shared, zero_advantage, passes = (int(totals.get(name, 0)) for name in names.SAVED_TOKENS)
    saved = shared + zero_advantage + passes
    of = saved + int(totals[names.ALL_COMPUTED_TOKENS])
    rows = int(totals.get(names.DROPPED_ROWS.format(update=ACTOR), 0))
    n_passes = int(totals.get(names.SAVED_PASSES, 0))
    parts = {
        "shared": shared,
        f"in {rows:,} skipped rows": zero_advantage,
        f"in {n_passes:,} skipped passes": passes,
    }
    details = ", ".join(f"{tokens:,} {what}" for what, tokens in parts.items() if tokens)
    return details and f"saved {saved:,} of {of:,} tokens ({saved / of:.0%}): {details}"
