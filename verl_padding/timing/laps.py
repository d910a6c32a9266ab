"""Laps: what each micro-batch took on each rank, and the file that keeps those of a step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_padding.errors import PaddingDataError

SUFFIX = ".jsonl"


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One micro-batch on one rank, backward pass included: from its start to that of the next one, or the call's end.

    In a pipeline, where the passes of micro-batches alternate, a lap is a whole mini-batch.
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
    """Most memory that the process has held since the call began: reserved on the device, or resident on a CPU."""
    allocated_bytes: int | None
    """Most memory that tensors have held on the device since the call began; None on a CPU."""

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
    laps: list[Lap] = field(repr=False)

    def by_call(self) -> dict[str, list[Lap]]:
        """The laps of each call, calls and laps in the order in which they began."""
        found: dict[str, list[Lap]] = defaultdict(list)
        for lap in sorted(self.laps, key=lambda lap: lap.start_s):
            found[lap.call].append(lap)
        return found


def by_micro_batch(laps: Iterable[Lap]) -> list[list[Lap]]:
    """The laps of a call, those of a micro-batch on all ranks together."""
    found: dict[tuple[int, int], list[Lap]] = defaultdict(list)
    for lap in laps:
        found[lap.mini_batch, lap.micro_batch].append(lap)
    return list(found.values())


def write_step(timed: Iterable[TimedStep], path: Path) -> None:
    """Writes the updates of a step: of each a line with its step and keys, then a line for each lap."""
    lines: list[dict[str, Any]] = []
    for each in timed:
        lines.append({"step": each.step, "keys": list(each.keys)})
        lines.extend(map(vars, each.laps))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read_steps(path: Path) -> list[TimedStep]:
    """The batches of a step's file, mostly one.

    Raises:
        PaddingDataError: it cannot be read, or holds something else.
    """
    steps: list[TimedStep] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            if "keys" in values:
                steps.append(TimedStep(step=values["step"], keys=values["keys"], laps=[]))
            else:
                tuples = {name: tuple(values[name]) for name in ("rows", "computed_tokens")}
                steps[-1].laps.append(Lap(**values | tuples))
        if not steps:
            raise LookupError("it holds no step")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise PaddingDataError(f"{path}: no laps ({error!r}). Name a file of padding.timing_dir.") from error
    return steps
