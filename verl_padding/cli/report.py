"""The command ``verl-padding report``: runs as one page."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from verl_padding.cli.curves import Curves, noted, read_curves
from verl_padding.cli.page import ShownStep, cut_text, write_page
from verl_padding.errors import PaddingDataError
from verl_padding.job.savings import saved_line
from verl_padding.record.run_files import METRICS, ROLLOUTS, dumps_in, read_dump
from verl_padding.record.step_file import FOLDER, RecordedStep, read_steps

KEPT, KEPT_BESIDE = 400, 160
"""Characters that are kept at either end of a text, and at either side of where two rows branch."""


def write_report(
    folders: Sequence[Path], out: Path, *, steps: Sequence[int] | None = None
) -> list[str]:
    """Writes the page of runs, whose folders are as the demo and the recipes' scripts leave them.

    Returns: what was saved and what was left out, which the page says too.

    Args:
        steps: which recorded steps are shown; None for all.

    Raises:
        PaddingDataError: a folder holds neither metrics nor recorded steps, or its metrics are
            refused.
    """
    curves: dict[str, Curves] = {}
    recorded: list[tuple[str, Path]] = []
    saved: list[str] = []
    notes: list[str] = []
    for folder in folders:
        run, paths = str(folder), dumps_in(folder / FOLDER)
        curves[run], left_out = read_curves(folder)
        if not curves[run] and not paths:
            why = f"holds neither {METRICS} nor {FOLDER}/<step>.jsonl"
            fix = "Name the folder of a job with padding.record=true"
            raise PaddingDataError(f"{folder}: {why}. {fix}.")
        notes += left_out
        recorded += [(run, path) for path in paths if steps is None or int(path.stem) in steps]
        totals = {
            name: sum(value for value in values.values() if 0 <= value < 1e18)  # NaN is not
            for name, values in curves[run].items()
        }
        if line := saved_line(totals):
            saved.append(f"{folder}: {line}")
        last = max((step for values in curves[run].values() for step in values), default=None)
        # The step after it may be running.
        beyond = [path.name for path in paths if last is not None and int(path.stem) > last + 1]
        if beyond:
            why = f"{', '.join(beyond)}: beyond the last step of {METRICS}, {last}"
            notes.append(f"{folder / FOLDER}: {why}. Remove them if they are another run's.")
    if steps and not recorded:
        raise PaddingDataError(f"--steps={steps}: none of them is recorded. Choose others.")
    # Read one by one while the page is written, since a long run does not fit into memory at once.
    shown = (each for run, path in recorded for each in _shown_steps(run, path, notes))
    title = " and ".join(folder.resolve().name for folder in folders)
    write_page(out, title=title, curves=curves, steps=shown, saved=saved, notes=notes)
    return [*saved, *notes]


def _shown_steps(run: str, path: Path, notes: list[str]) -> Iterator[ShownStep]:
    """The local updates of a recorded step, with the texts of its rollout dump."""
    texts: Mapping[str, tuple[str, str]] = {}
    updates: Sequence[RecordedStep] = ()
    dump = Path(run) / ROLLOUTS / path.name
    with noted(notes):
        updates = read_steps(path)
        rows = read_dump(dump, uid=str, input=str, output=str) if dump.exists() else []
        texts = {row["uid"]: (row["input"], row["output"]) for row in rows}
    for update in updates:
        yield ShownStep(run=run, update=update, texts=_shown_texts(update, texts))


def _shown_texts(
    update: RecordedStep, texts: Mapping[str, tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """Of a row's key: its input, its output, and where it branches off the row that it shares
    with."""
    shown: dict[str, dict[str, Any]] = {}
    for row in update.rows:
        if row.key not in texts:
            continue
        prompt, answer = texts[row.key]
        shown[row.key] = {"input": cut_text(prompt, KEPT), "output": cut_text(answer, KEPT)}
        other = row.key if row.shares_with is None else update.keys[row.shares_with]
        if other != row.key and other in texts:
            shown[row.key] |= _branch(prompt + answer, "".join(texts[other]))
    return shown


def _branch(mine: str, other: str) -> dict[str, Any]:
    """Where a text branches off another one, in characters, and what is at either side of that
    place."""
    pairs = zip(mine, other, strict=False)
    at = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return {
        "branch_at": at,
        "before": mine[max(at - KEPT_BESIDE, 0) : at],
        "mine": mine[at : at + KEPT_BESIDE],
        "other": other[at : at + KEPT_BESIDE],
    }
