"""The curves of a run over its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_padding.errors import PaddingDataError
from verl_padding.job.metric_names import SESSION_SCORE
from verl_padding.record.run_files import ROLLOUTS, dumps_in, read_metrics, read_step

SESSION_REWARD = "mean reward of a session"
ACTOR_STEPS = "padding/actor/optimizer_steps/total"
Curves = dict[str, dict[int, float]]
"""Metric -> step -> value, NaN where it is unknown."""


@contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    """What is refused of a run is left out, and noted once."""
    try:
        yield
    except PaddingDataError as refusal:
        if (note := f"Left out: {refusal}") not in notes:
            notes.append(note)


def read_curves(folder: Path) -> tuple[Curves, list[str]]:
    """The metrics of a run, and the mean reward of a session at each step, which stock verl does
    not log; and why dumps were left out."""
    curves: Curves = {}
    notes: list[str] = []
    metrics = dict(read_metrics(folder))
    for step, data in metrics.items():
        for name, value in data.items():
            curves.setdefault(name, {})[step] = value
    # The logged reward may be unknown, but it is there: then the dump would not help.
    rewards = dict(curves.get(SESSION_SCORE, {}))
    for path in dumps_in(folder / ROLLOUTS):
        if (step := int(path.stem)) in metrics.keys() - rewards.keys():
            with noted(notes):
                rewards[step] = read_step(path).reward
    if rewards:
        curves[SESSION_REWARD] = dict(sorted(rewards.items()))
    return curves, notes
