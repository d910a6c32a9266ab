"""The command ``verl-padding report``: runs as one page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.cli.page import ShownStep, cut_text, recorded_step, write_page
from verl_padding.errors import PaddingDataError
from verl_padding.pads.tags import PAD_UID_PREFIX
from verl_padding.record.step_file import FOLDER, RecordedStep, read_steps
from verl_padding.runs.curves import SESSION_REWARD, Curves, read_curves
from verl_padding.runs.run_files import METRICS, ROLLOUTS, dumps_in, read_dump

KEPT, KEPT_BESIDE = 400, 160
"""Characters that are kept at either end of a text, and at either side of where two rows part."""


def write_report(
    folders: Sequence[Path], out: Path, *, steps: str | None = None, whole_texts: bool = False
) -> list[str]:
    """Writes the page of runs, whose folders are as the demo and the recipes' scripts leave them.

    Returns: what was left out, which the page says too.

    Args:
        steps: which recorded steps are shown, as ``1,5,10-20``; None for all.
        whole_texts: False to cut texts short.

    Raises:
        PaddingDataError: a folder holds neither metrics nor recorded steps, or its metrics are
            refused.
    """
    curves: dict[str, Curves] = {}
    recorded: dict[str, dict[int, Path]] = {}
    notes: list[str] = []
    for folder in folders:
        run = str(folder)
        curves[run], left_out = read_curves(folder)
        notes += left_out
        recorded[run] = {int(path.stem): path for path in dumps_in(folder / FOLDER)}
        if not curves[run] and not recorded[run]:
            why = f"holds neither {METRICS} nor {FOLDER}/<step>.jsonl"
            raise PaddingDataError(
                f"{folder}: {why}. Name the folder of a job with padding.record=true."
            )
        logged = set(curves[run].get(SESSION_REWARD, ()))
        if logged and (others := sorted(recorded[run].keys() - logged)):
            why = "recorded by an earlier job in this folder, or not logged yet"
            notes.append(
                f"{folder}: {METRICS} does not have steps {', '.join(map(str, others))}: {why}."
            )
    wanted = _wanted(steps, [step for of_run in recorded.values() for step in of_run])
    shown = (
        shown_step
        for run, of_run in recorded.items()
        for step, path in of_run.items()
        if step in wanted
        for shown_step in _shown_steps(run, path, notes, whole_texts=whole_texts)
    )
    title = " and ".join(folder.resolve().name for folder in folders)
    write_page(out, title=title, curves=curves, steps=shown, notes=notes)
    return notes


def _wanted(steps: str | None, recorded: Sequence[int]) -> set[int]:
    if steps is None:
        return set(recorded)
    try:
        ends = [part.partition("-") for part in steps.split(",")]
        wanted = {
            step for first, _, last in ends for step in range(int(first), int(last or first) + 1)
        }
    except ValueError as error:
        raise PaddingDataError(
            f"--steps {steps}: not numbers of steps. Write them as 1,5,10-20."
        ) from error
    if not wanted & set(recorded):
        there = (
            f"Choose from {min(recorded)} to {max(recorded)}"
            if recorded
            else "Leave the option out"
        )
        raise PaddingDataError(f"--steps {steps}: none of them is recorded. {there}.")
    return wanted


def _shown_steps(
    run: str, path: Path, notes: list[str], *, whole_texts: bool
) -> Iterator[ShownStep]:
    """The local updates of a recorded step, with the texts of its rollout dump."""
    texts: Mapping[str, tuple[str, str]] = {}
    updates: Sequence[RecordedStep] = ()
    dump = Path(run) / ROLLOUTS / path.name
    try:
        updates = read_steps(path)
        texts = _read_texts(dump) if dump.exists() else {}
    except PaddingDataError as refusal:
        note = f"Left out: {refusal}"
        notes += [note] if note not in notes else []
    for update in updates:
        yield recorded_step(update, run=run, texts=_shown_texts(update, texts, whole=whole_texts))


def _read_texts(dump: Path) -> dict[str, tuple[str, str]]:
    """Input and output of the rows of a rollout dump by their keys, without stock verl's pads."""
    rows = read_dump(dump, uid=str, input=str, output=str)
    return {
        row["uid"]: (row["input"], row["output"])
        for row in rows
        if not row["uid"].startswith(PAD_UID_PREFIX)
    }


def _shown_texts(
    update: RecordedStep, texts: Mapping[str, tuple[str, str]], *, whole: bool
) -> dict[str, Any]:
    kept, beside = (math.inf, math.inf) if whole else (KEPT, KEPT_BESIDE)
    shown: dict[str, Any] = {}
    for number, key in enumerate(update.keys):
        if key not in texts:
            continue
        prompt, answer = texts[key]
        shown[key] = {"input": cut_text(prompt, kept), "output": cut_text(answer, kept)}
        other = update.rows[number].shares_with if update.rows else None
        if other is not None and update.keys[other] in texts:
            shown[key] |= _parting(prompt + answer, "".join(texts[update.keys[other]]), beside)
    return shown


def _parting(mine: str, other: str, beside: float) -> dict[str, Any]:
    """Where a text parts from another one, in characters, and what is at either side of that
    place."""
    at = _first_difference(mine, other)
    kept = int(min(beside, len(mine) + len(other)))
    before = mine[max(at - kept, 0) : at]
    return {
        "parts_at": at,
        "before": before,
        "mine": mine[at : at + kept],
        "other": other[at : at + kept],
    }


def _first_difference(mine: str, other: str) -> int:
    codes = [
        np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") for text in (mine, other)
    ]
    shorter = min(map(len, codes))
    differ = np.flatnonzero(codes[0][:shorter] != codes[1][:shorter])
    return int(differ[0]) if len(differ) else shorter
