"""Laps: what each micro-batch took on each rank, and the file that keeps those of a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verl_padding.errors import PaddingDataError

SUFFIX = ".jsonl"


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One micro-batch on one rank: from the start of its forward pass to that of the next one, or to the call's end.

    In an update this holds the backward pass. In a pipeline, where the passes of micro-batches alternate, a lap is a
    whole mini-batch.
    """

    call: str
    """The worker call, as the plan names it."""

    rank: int
    """Data-parallel rank."""

    mini_batch: int
    """Its number in the call, from 0; with several epochs they go on counting."""

    micro_batch: int
    """Its number in the mini-batch, from 0."""

    start_s: float
    """When it began, in seconds since the epoch, by the clock of the rank's node."""

    seconds: float
    """How long it took, with what the rank waited for others."""

    forward_s: float | None
    """How long its forward pass took of these; in an update the rest is the backward pass. None in a pipeline."""

    busy_s: float | None
    """How long the rank computed; None where that cannot be told apart (a GPU, or a CPU with several threads)."""

    rows: tuple[int, ...]
    """Numbers of its real rows in the batch."""

    pads: int
    """Its pads."""

    computed_tokens: tuple[int, ...]
    """Tokens of each row that was computed, pads among them; of rows that share a prefix only the longest is."""

    reserved_bytes: int
    """Most memory that the process has held since the worker call began: reserved on the device, or resident on a CPU.

    Where it grew from a mini-batch to the next, the later one took it, or what lies between them: optimizer steps, and
    whatever else runs in the process.
    """

    allocated_bytes: int | None
    """Most memory that tensors have held on the device since the worker call began; None on a CPU."""

    @property
    def tokens(self) -> int:
        """Tokens that were computed."""
        return sum(self.computed_tokens)


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """The laps of a training step."""

    step: int
    keys: Sequence[str] = field(repr=False)
    """Key of each row of the batch."""
    laps: Sequence[Lap] = field(repr=False)

    def of_call(self, call: str) -> list[Lap]:
        """The laps of a call."""
        return [lap for lap in self.laps if lap.call == call]

    @property
    def calls(self) -> list[str]:
        """Calls that have laps, in the order in which they began."""
        return list(dict.fromkeys(lap.call for lap in sorted(self.laps, key=lambda lap: lap.start_s)))


def write_step(timed: Iterable[TimedStep], path: Path) -> None:
    """Writes the updates of a step: of each a line with its step and keys, then a line for each lap."""
    lines: list[dict[str, Any]] = []
    for each in timed:
        lines.append({"step": each.step, "keys": list(each.keys)})
        lines.extend(map(vars, each.laps))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read_steps(path: Path) -> Iterator[TimedStep]:
    """The batches of a step's file, mostly one.

    Raises:
        PaddingDataError: it cannot be read, or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PaddingDataError(f"{path}: cannot be read ({error}). Name a file of padding.timing_dir.") from error
    head: dict[str, Any] | None = None
    laps: list[Lap] = []
    for number, line in enumerate(lines):
        try:
            said = json.loads(line)
            if "keys" in said or head is None:
                if head is not None:
                    yield TimedStep(step=head["step"], keys=head["keys"], laps=laps)
                head, laps = {"step": int(said["step"]), "keys": list(said["keys"])}, []
            else:
                laps.append(_lap(said))
        except (ValueError, TypeError, KeyError) as error:
            raise PaddingDataError(
                f"{path}, line {number} (from 0): not a lap ({error}). Name a file of padding.timing_dir."
            ) from error
    if head is None:
        raise PaddingDataError(f"{path}: holds no step. Name a file of padding.timing_dir.")
    yield TimedStep(step=head["step"], keys=head["keys"], laps=laps)


def _lap(said: dict[str, Any]) -> Lap:
    values = {each.name: said[each.name] for each in fields(Lap)}
    return Lap(**values | {name: tuple(values[name]) for name in ("rows", "computed_tokens")})
