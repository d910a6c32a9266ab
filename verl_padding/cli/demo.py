"""The demo: the recipe ``context_reset`` on this machine's CPU, with a line per step and a picture at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_padding.cli.demo_folder import ASSETS, HYDRA, PICTURE, demo_folder
from verl_padding.errors import PaddingDataError
from verl_padding.local.launch import LOG, run_local_job
from verl_padding.runs.curves import CONFIG
from verl_padding.runs.faults import Faults
from verl_padding.runs.learning import Learning
from verl_padding.runs.report import (
    METRICS,
    ROLLOUTS,
    comparison_table,
    draw_curves,
    read_metrics,
    read_rows,
    stock_step_table,
)
from verl_padding.runs.step_lines import StepLines
from verl_padding.stock.rule import StockRule

NOT_LEARNED = 3
"""Exit code. 1 and 2 are taken, by a job that failed and a command line that cannot be read."""

VISION = {"torchvision": "torchvision", "PIL": "pillow", "qwen_vl_utils": "qwen-vl-utils"}
"""Modules of the extra ``vision``, and their packages."""


def run_demo(*, steps: int, out: Path, stock: bool, images: bool = False, seed: int = 0) -> int:
    """Runs the job, prints its steps, writes the picture, and says whether the agent has learned.

    Returns: the job's exit code, but `NOT_LEARNED` if the job ran to its end and the agent has not learned.

    Raises:
        PaddingDataError: ``out`` cannot be the demo's folder, or a package is missing.
    """
    if images:
        _refuse_without_vision()
    with demo_folder(out) as folder:
        return _run(folder, steps=steps, stock=stock, images=images, seed=seed)


def demo_job(out: Path, *, stock: bool, images: bool = False, seed: int = 0) -> list[str]:
    """Makes model and data below ``out``; returns the overrides of the demo's job, except its steps and folders."""
    from verl_padding.recipes.context_reset.job import tiny_job

    padding = [] if stock else ["+padding=prompt", f"padding.seed={seed}", "padding.timing=true"]
    return [*tiny_job(out / ASSETS, images=images, seed=seed), *padding]


def _refuse_without_vision() -> None:
    missing = [package for module, package in VISION.items() if find_spec(module) is None]
    if missing:
        raise PaddingDataError(
            f"--images: needs {', '.join(missing)}, not installed here. Install the extra in a checkout: "
            'pip install -e ".[vision]".'
        )


def _run(out: Path, *, steps: int, stock: bool, images: bool, seed: int) -> int:
    console = Console()
    with _output_to(out / LOG):
        from verl_padding.recipes.context_reset.job import GOAL, IMAGES_GOAL

        overrides = [
            *demo_job(out, stock=stock, images=images, seed=seed),
            f"trainer.total_training_steps={steps}",
            f"trainer.rollout_data_dir={out / ROLLOUTS}",
            f"hydra.run.dir={out / HYDRA}",
        ]
    started = time.monotonic()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        teller = _StepTeller(out, progress, steps)
        code = run_local_job(overrides, folder=out, on_line=teller.look)
        teller.look()
    minutes = (time.monotonic() - started) / 60
    if code:
        _tell(console, f"The job ended with code {code}; its output is in {out / LOG}.", style="red")
        return code
    metrics, rows = read_metrics(out), read_rows(out)
    rule = StockRule.of_config(_load_config(out / CONFIG))
    with _output_to(out / LOG):
        draw_curves(out / PICTURE, metrics, rows, rule)
    if stock:
        console.print(stock_step_table(rows, rule))
    console.print(comparison_table(rows, [data for _, data in metrics], rule))
    learning = Learning.of([step.reward for step in rows], IMAGES_GOAL if images else GOAL)
    _tell(
        console,
        f"The run took {minutes:.1f} minutes, start included. The picture is in {out / PICTURE}, the metrics are in "
        f"{out / METRICS}, the rollouts in {out / ROLLOUTS}, and what the job said is in {out / LOG}.",
    )
    failed = learning.learned is False
    _tell(console, str(learning), style="red" if failed else "green" if learning.learned else None)
    return NOT_LEARNED if failed else 0


def _tell(console: Console, told: str, *, style: str | None = None) -> None:
    """Prints a line that may hold paths, which are not broken."""
    console.print(told, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Adds what libraries print in this process, their progress bars and warnings, to a file.

    File descriptors are turned, not ``sys.stdout``: a logger keeps the stream that it found when it was made, and
    libraries in C++ know no other way.
    """
    kept = {number: os.dup(number) for number in (1, 2)}
    with log.open("ab") as file:
        _flush()
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            _flush()
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class _StepTeller:
    """Prints a line for each step that verl has logged, and moves the progress bar; if it cannot, the job goes on."""

    def __init__(self, folder: Path, progress: Progress, steps: int):
        self._lines = StepLines(folder)
        self._progress = progress
        self._faults = Faults(lambda sentence: _tell(progress.console, sentence, style="red"))
        self._task = progress.add_task("starting Ray, TransferQueue, two FSDP2 ranks", total=steps)

    def look(self, _line: str = "") -> None:
        with self._faults.told_once():
            for line in self._lines.new():
                self._progress.update(self._task, description="training", completed=self._lines.told)
                self._progress.console.print(line)


def _load_config(path: Path) -> DictConfig:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig), path
    return config
