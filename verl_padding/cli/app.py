"""The command ``verl-padding``."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from verl_padding.errors import PaddingError
from verl_padding.job.composition import CONFIG_PATH, PRIMARY, JobArguments
from verl_padding.on_cpu.tiny_models import TinyModelKind
from verl_padding.version import __version__


class _Commands(TyperGroup):
    """Shows a refusal, or a file that cannot be read or written, in a line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (PaddingError, OSError) as refusal:
            typer.secho(str(refusal), fg="red", err=True)
            raise typer.Exit(1) from refusal


# Imports are light, and those of a command are in it: the doctor has to run where they fail.
app = typer.Typer(cls=_Commands, no_args_is_help=True)

HYDRA = {"ignore_unknown_options": True}  # such as --config-name, which Hydra's own parser reads
OVERRIDES = typer.Argument(
    help="A job's overrides, as for verl.trainer.main_ppo, with --config-name and --config-dir."
)


def job_arguments(arguments: list[str] | None) -> JobArguments:
    """What a job's command line says to Hydra, by Hydra's own parser."""
    from hydra._internal.utils import get_args_parser

    # Options of Hydra may stand between overrides, as verl's own command takes them.
    parsed = get_args_parser().parse_intermixed_args(arguments or [])
    return JobArguments(
        overrides=tuple(parsed.overrides),
        config_name=parsed.config_name or PRIMARY,
        config_path=parsed.config_path or CONFIG_PATH,
        config_dir=parsed.config_dir,
    )


def _show_version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(f"verl_padding {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Batches of any size for verl."""
    # A config, a tokenizer or a row may name something of the hub. Read when its packages are
    # imported, by the processes of a job, too.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@app.command()
def demo(
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps. The reward is above 0.9 after 50.")
    ] = 50,
    out: Annotated[Path, typer.Option(help="Output folder, new or empty.")] = Path("demo_out"),
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the model, the data and all random draws.")
    ] = 0,
) -> None:
    """Trains a tiny multi-turn agent on this machine's CPU: verl's trainer, Ray, TransferQueue, two
    FSDP2 ranks.

    It writes a report, OUT/report.html. The exit code is the job's, or 1 if it was
    refused.
    """
    from verl_padding.cli.demo import run_demo

    sys.exit(run_demo(steps=steps, out=out, seed=seed))


@app.command()
def plan(
    rows: Annotated[
        Path,
        typer.Argument(help="A file of rows, a recorded step, or a rollout dump."),
    ],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks.")] = None,
    mini_batch: Annotated[
        int | None, typer.Option(min=1, help="Prompts per optimizer step.")
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Rollouts per prompt.")] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a micro-batch on one rank.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for the texts of a rollout dump.")
    ] = None,
) -> None:
    """Plans batches of rows: shows optimizer steps, micro-batches, pads, and how long ranks would
    wait for each other.

    Ranks, batch sizes, token budgets and settings come from a job, whose overrides follow --.
    --dp, --mini-batch, --n and --budget are shortcuts for overrides.
    """
    from verl_padding.cli.plan import job_to_plan, show_plan

    given = job_arguments(overrides)
    job = job_to_plan(given, dp=dp, mini_batch=mini_batch, n=n, budget=budget)
    show_plan(rows, job, tokenizer=tokenizer)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs: the demo's, or the OUT of a recipe's script."),
    ],
    out: Annotated[Path, typer.Option(help="File of the report.")] = Path("report.html"),
    steps: Annotated[
        list[int] | None,
        typer.Option(help="A recorded step to show; repeat it for several. Default: all."),
    ] = None,
) -> None:
    """Writes a report of one or more runs: curves side by side, steps, rows and their texts. It
    opens in a browser, without a network."""
    from verl_padding.cli.report import write_report

    for note in write_report(runs, out, steps=steps):
        typer.echo(note, err=True)
    typer.echo(f"The report is {out}.")


@app.command()
def tiny_model(
    folder: Annotated[Path, typer.Argument(help="The model's folder, new or empty.")],
    family: Annotated[
        TinyModelKind,
        typer.Option(help="Architecture; qwen3_vl reads images and needs the extra vision."),
    ] = "qwen2",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Makes a tiny model with random weights and a byte tokenizer, to try an agent on a CPU."""
    from verl_padding.on_cpu.tiny_models import write_tiny_model

    write_tiny_model(family, folder, seed=seed)
    typer.echo(
        f"The model is in {folder}. In a job: actor_rollout_ref.model.path={folder.resolve()}"
    )


@app.command("dry-run", context_settings=HYDRA)
def dry_run(
    overrides: Annotated[list[str], OVERRIDES],
    reply: Annotated[
        list[str] | None,
        typer.Option(help="A reply, besides random text and tool calls; repeatable."),
    ] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Timeout of the job, in seconds.")] = 900,
) -> None:
    """Runs one step of a job on this machine's CPU, with scripted replies and a shrunk model.

    The job's own data set, agent loops, tools and rewards run. The exit code is 1 if something is
    wrong.
    """
    from verl_padding.cli.dry_run import dry_run as run

    job, console = job_arguments(overrides), Console(file=sys.stdout)
    sys.exit(run(job, console=console, replies=reply or [], timeout_s=timeout))


@app.command(context_settings=HYDRA)
def doctor(overrides: Annotated[list[str] | None, OVERRIDES] = None) -> None:
    """Checks whether the plug-in works, and whether a job can start on this machine. Ray is not
    started.

    The exit code is 1 if something is wrong.
    """
    from verl_padding.cli.doctor.command import diagnose

    job = job_arguments(overrides) if overrides else None
    sys.exit(diagnose(job, console=Console()))
