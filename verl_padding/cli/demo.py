"""The demo: the recipe ``context_reset`` on this machine's CPU, with a line per step and a page at
the end."""

import math
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console

from verl_padding.cli.curves import ACTOR_STEPS
from verl_padding.cli.report import write_report
from verl_padding.errors import PaddingDataError
from verl_padding.job.metric_names import GRAD_NORM, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.record.run_files import CONFIG, ROLLOUTS, ROW_REWARD, read_metrics

ASSETS, PAGE = "assets", "report.html"
HYDRA = CONFIG.parts[0]
# Sessions are played by two processes, and earn their rewards there.
FOR_TWO_CORES = ("actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=0")
COLUMNS = {
    "row reward": ROW_REWARD,
    "rows": REAL_ROWS_TOTAL,
    "pads": PAD_ROWS_TOTAL,
    "optimizer steps": ACTOR_STEPS,
    "grad norm": GRAD_NORM,
    "seconds": "timing_s/step",
}
"""Heading -> metric in the line of a step."""


def empty_folder(out: Path) -> Path:
    """Makes a folder for one run, and returns its absolute path; raises PaddingDataError if it
    holds something."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise PaddingDataError(f"{out}: is not empty. Name a new folder, or remove this one.")
    return out.resolve()


def demo_job(out: Path, *, seed: int = 0) -> list[str]:
    """Makes model and data below ``out``; returns the overrides of the demo's job, except its steps
    and folders."""
    from verl_padding.recipes.context_reset.job import tiny_job

    flag = ("+padding=fast", "padding.optimizer_steps=configured", f"padding.seed={seed}")
    return [*tiny_job(out / ASSETS, seed=seed), *FOR_TWO_CORES, *flag, "padding.record=true"]


def run_demo(*, steps: int, out: Path, seed: int = 0) -> int:
    """Runs the job, prints its steps, writes the page of the run, and returns the job's exit
    code."""
    out = empty_folder(out)
    console = Console(soft_wrap=True, highlight=False)
    # Progress bars and warnings of libraries.
    with (out / LOG).open("a") as log, redirect_stdout(log), redirect_stderr(log):
        overrides = demo_job(out, seed=seed)
    overrides += [
        f"trainer.total_training_steps={steps}",
        f"trainer.rollout_data_dir={out / ROLLOUTS}",
        f"hydra.run.dir={out / HYDRA}",
    ]
    shown = 0
    console.print("  ".join(["step", *COLUMNS]))
    with console.status("training by Ray, TransferQueue and two FSDP2 ranks"):

        def show_steps(_line: str = "") -> None:
            nonlocal shown
            for line in step_lines(out, after=shown):
                console.print(line)
                shown += 1

        # Whenever the job prints something, a step may have come to its metrics.
        code = run_local_job(overrides, folder=out, on_line=show_steps)
        show_steps()
    if code:
        ended = f"The job ended with code {code}; its output is in {out / LOG}."
        console.print(ended, style="red", markup=False)
        return code
    for line in (*write_report([out], out / PAGE), f"The report is {out / PAGE}."):
        console.print(line, markup=False)
    return 0


def step_lines(folder: Path, *, after: int) -> Iterator[str]:
    """A line for each step that verl has logged in a folder but the first ``after``."""
    for step, data in read_metrics(folder)[after:]:
        cells = [
            f"{data.get(metric, math.nan):.4g}".rjust(len(name)) for name, metric in COLUMNS.items()
        ]
        yield "  ".join([f"{step:>4}", *cells])
