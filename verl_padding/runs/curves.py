"""The curves of a run over its steps."""

from collections.abc import Mapping
from pathlib import Path

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.job.metric_names import (
    OPTIMIZER_STEPS,
    PAD_ROWS_TOTAL,
    REAL_ROWS_TOTAL,
    SESSION_SCORE,
)
from verl_padding.record.data_errors import as_data_error
from verl_padding.runs.run_files import (
    CONFIG,
    ROLLOUTS,
    StepRows,
    dumps_in,
    read_config,
    read_metrics,
    read_step,
)
from verl_padding.stock.padding import StockRule

SESSION_REWARD = "mean reward of a session"
ACTOR_STEPS = OPTIMIZER_STEPS.format(update=ACTOR)
Curves = dict[str, dict[int, float]]
"""Metric -> step -> value, NaN where it is unknown."""


def read_curves(folder: Path) -> tuple[Curves, list[str]]:
    """The metrics of a run, and the mean reward of a session at each step.

    Stock verl logs neither pads nor optimizer steps. They follow from its dumps and its config, and
    have the names of a padded run's metrics, so that both are lines of one chart.

    Returns: the curves, and why dumps were left out.
    """
    curves: Curves = {}
    metrics = read_metrics(folder)
    for step, data in metrics:
        for name, value in data.items():
            curves.setdefault(name, {})[step] = value
    # The logged reward may be unknown, but it is there: then the dump would not help.
    rewards = dict(curves.get(SESSION_SCORE, {}))
    dumped, notes = _read_dumps(folder, {step for step, _ in metrics} - rewards.keys())
    rewards |= {step: rows.reward for step, rows in dumped.items()}
    if rewards:
        curves[SESSION_REWARD] = dict(sorted(rewards.items()))
    # A run of stock verl. Its dumps hold its pads, and its rule says how many steps they make: 100
    # rows with mini-batches of 64 are padded to 128, and take two.
    if dumped and PAD_ROWS_TOTAL not in curves:
        curves[REAL_ROWS_TOTAL] = {step: rows.real for step, rows in dumped.items()}
        curves[PAD_ROWS_TOTAL] = {step: rows.dumped_pads for step, rows in dumped.items()}
        if (folder / CONFIG).exists():
            try:
                curves[ACTOR_STEPS] = _stock_steps(folder / CONFIG, dumped)
            except PaddingDataError as refusal:
                notes.append(f"Left out: {refusal}")
    return curves, notes


def _stock_steps(path: Path, dumped: Mapping[int, StepRows]) -> dict[int, float]:
    """Optimizer steps that stock verl makes of the rows of each step."""
    config = read_config(path)
    with as_data_error(str(path), "the config of a job", "Move it elsewhere"):
        rule = StockRule.of_config(config)
    return {step: float(rule.optimizer_steps(rows.real)) for step, rows in dumped.items()}


def _read_dumps(folder: Path, steps: set[int]) -> tuple[dict[int, StepRows], list[str]]:
    dumped, notes = {}, []
    for path in dumps_in(folder / ROLLOUTS):
        if int(path.stem) not in steps:
            continue
        try:
            dumped[int(path.stem)] = read_step(path)
        except PaddingDataError as refusal:
            notes.append(f"Left out: {refusal}")
    return dumped, notes
