"""The demo: the recipe ``context_reset`` on this machine's CPU, with a line per step and a picture at the end."""

import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_padding.errors import PaddingDataError
from verl_padding.on_cpu.launch import LOG, run_local_job
from verl_padding.record.step_file import FOLDER
from verl_padding.runs.curves import CONFIG, RunCurves, draw, stock_rule_of, table_of
from verl_padding.runs.follow import StepLines
from verl_padding.runs.report import LAST, METRICS, ROLLOUTS, Learning, read_step

NOT_LEARNED = 3  # exit code; 1 and 2 are taken, by a job that failed and a command line that cannot be read
PICTURE = "reward.png"
ASSETS = "assets"
HYDRA = CONFIG.parts[0]
# Sessions are played by two processes, and earn their rewards there.
FOR_TWO_CORES = ("actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=0")


def empty_folder(out: Path) -> Path:
    """Makes a folder for one run, and returns its absolute path; raises PaddingDataError if it holds something."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise PaddingDataError(f"{out}: is not empty. Name a new folder, or remove this one.")
    return out.resolve()


def demo_job(out: Path, *, stock: bool, images: bool = False, seed: int = 0) -> list[str]:
    """Makes model and data below ``out``; returns the overrides of the demo's job, except its steps and folders."""
    from verl_padding.recipes.context_reset.job import tiny_job

    padding = [] if stock else ["+padding=prompt", f"padding.seed={seed}", "padding.timing=true", "padding.record=true"]
    return [*tiny_job(out / ASSETS, images=images, seed=seed), *FOR_TWO_CORES, *padding]


class _Learned(Exception):  # noqa: N818
    """Ends a job whose agent has learned its task."""


def run_demo(*, steps: int | None, out: Path, stock: bool, images: bool = False, seed: int = 0) -> int:
    """Runs the job, prints its steps, writes the picture, and reports whether the agent has learned.

    Args:
        steps: None for as many as the agent takes to learn its task, at most those that the recipe is made for.

    Returns: the job's exit code, but `NOT_LEARNED` if the job ran to its end and the agent has not learned.
    """
    name, out = out, empty_folder(out)
    console = Console(soft_wrap=True, highlight=False)
    # Progress bars and warnings of libraries.
    with (out / LOG).open("a") as log, redirect_stdout(log), redirect_stderr(log):
        from verl_padding.recipes.context_reset.job import GOAL, IMAGES_GOAL

        overrides = demo_job(out, stock=stock, images=images, seed=seed)
    goal = IMAGES_GOAL if images else GOAL
    most_steps = goal.steps if steps is None else steps
    overrides += [
        f"trainer.total_training_steps={most_steps}",
        f"trainer.rollout_data_dir={out / ROLLOUTS}",
        f"hydra.run.dir={out / HYDRA}",
    ]
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting Ray, TransferQueue, two FSDP2 ranks", total=most_steps)
        lines, rewards = StepLines(out), list[float]()

        def show_steps() -> None:
            for line in lines.new():
                progress.update(task, description="training", completed=lines.shown)
                progress.console.print(line)

        def follow(_line: str) -> None:
            show_steps()
            # verl writes a dump beside the step that follows it, whose metrics show that it is whole.
            while steps is None and len(rewards) < lines.shown - 1:
                rewards.append(read_step(out / ROLLOUTS / f"{len(rewards) + 1}.jsonl").reward)
                if len(rewards) >= LAST and Learning(rewards, goal).learned:
                    raise _Learned

        code, has_learned = 0, True
        with suppress(_Learned):
            code, has_learned = run_local_job(overrides, folder=out, on_line=follow), False
        show_steps()
    minutes = (time.monotonic() - started) / 60
    if code:
        console.print(f"The job ended with code {code}; its output is in {out / LOG}.", style="red", markup=False)
        return code
    # What was logged while the job was ended is not of the run.
    run = RunCurves.read(name, len(rewards) if has_learned else None)
    runs = [run] if stock else [run, run.by_stock_rule(stock_rule_of(out))]
    draw(runs, out / PICTURE)
    console.print(table_of(runs), soft_wrap=False)
    recorded = "" if stock else f"its recorded steps in {out / FOLDER}, "
    console.print(
        f"The run took {minutes:.1f} minutes, start included. The picture is in {out / PICTURE}, the metrics are in "
        f"{out / METRICS}, the rollouts in {out / ROLLOUTS}, {recorded}and the output of the job in {out / LOG}.",
        markup=False,
    )
    learning = Learning(run.reward, goal)
    styles = {True: "green", False: "red", None: None}
    console.print(str(learning), style=styles[learning.learned], markup=False)
    return NOT_LEARNED if learning.learned is False else 0
