"""What a user should know of a batch and its plan, beside the plan itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_padding.cli.planned_file import PlannedFile
from verl_padding.job.calls import ACTOR
from verl_padding.plan.counted import counted


def notes_of(planned: PlannedFile) -> list[str]:
    """What to know of one batch, a sentence or two each."""
    return [*_on_rows(planned), *_on_options(planned), *planned.plan.warnings]


def all_notes(files: Sequence[PlannedFile]) -> list[str]:
    """The notes of all files: each once, with the files that it is of unless it is of all."""
    files_of: dict[str, list[str]] = {}
    for planned in files:
        for note in notes_of(planned):
            files_of.setdefault(note, []).append(planned.batch.name)
    return [
        note if len(names) == len(files) else f"{names[0]}{_others(len(names) - 1)}: {note}"
        for note, names in files_of.items()
    ]


def _others(number: int) -> str:
    return f" and {counted(number, 'other file')}" if number else ""


def _on_rows(planned: PlannedFile) -> Iterator[str]:
    batch = planned.batch
    if planned.request.sharing == "chains" and batch.rows.extends_R is None:
        yield (
            "--sharing chains: no row says which one it extends, so nothing is shared. Give rows token_ids or "
            "extends, or take a rollout dump."
        )
    if batch.counted:
        yield "The lengths are an estimate: the tokenizer's counts of the rollout dump's input and output."
    if batch.pads:
        yield f"The plan leaves out {counted(batch.pads, 'pad')} of stock verl that the rollout dump holds."


def _on_options(planned: PlannedFile) -> Iterator[str]:
    """Options that the rows do not bear out."""
    request, job, rows = planned.request, planned.job, planned.batch.rows
    sessions_of: dict[str, set[str]] = {}
    for prompt, session in zip(rows.prompt_R, rows.session_R, strict=True):
        sessions_of.setdefault(prompt, set()).add(session)
    if job.prompts != len(sessions_of):
        yield (
            f"--mini-batch {request.mini_batch}: does not divide {counted(len(sessions_of), 'prompt')} with rows. "
            f"The batch is taken for one of {counted(job.prompts, 'prompt')}, of which "
            f"{job.prompts - len(sessions_of)} came back empty."
        )
    most = max(map(len, sessions_of.values()))
    if request.n != most:
        sessions = counted(most, "session")
        than = f"no prompt has more than {sessions}" if most < request.n else f"a prompt has {sessions}"
        yield f"--n {request.n}: {than}."
    layout = planned.plan.layouts[ACTOR]
    idle = [step for step, ranks in enumerate(layout.reporting_ranks_M) if ranks < layout.dp_size]
    if idle:
        rows_of_step = min(layout.real_rows_M[step] for step in idle)
        yield (
            f"--dp {request.dp_size}: ranks have nothing but pads in {len(idle)} of "
            f"{counted(layout.n_mini_batches, 'optimizer step')}, the smallest of which has "
            f"{counted(rows_of_step, 'row')}."
        )
