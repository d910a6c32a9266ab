"""The command ``verl-padding``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from verl_padding.config import PaddingConfig
from verl_padding.job.composition import CONFIG_PATH, PRIMARY, JobArguments
from verl_padding.plan import COST_MODELS, STRATEGIES, Packer, Sharing
from verl_padding.version import __version__

app = typer.Typer(no_args_is_help=True)

Family = Literal["qwen2", "qwen3", "qwen3_moe", "qwen3_vl"]
"""Families of tiny models. Named here again: the command line must not need what its commands need."""

Act = Literal["all", "sessions", "step"]

BESIDE = ("verl", "TransferQueue", "torch")
"""Packages whose versions a report of a fault should name."""

PLAN_FORMS = (
    'Each line of the file is a row: {"prompt": "p0", "session": 0, "tokens": 512}. In place of "tokens", it may have '
    '"prompt_tokens" and "response_tokens", or "token_ids". With "extends": 3, it begins with all tokens of row number '
    '3. Row numbers are lines, counted from 0. A line of a rollout dump has "uid", "input" and "output".\n\n'
    '--json prints {"steps": [{"ranks": [{"rows": [0, 2], "pads": 1}]}], "figures": {..}}. With --packer plan, a rank '
    'is {"micro_batches": [{"rows": [0, 2], "pads": 1}]}. docs/rows_file.md explains every field.'
)


def _tell_version(asked_for: bool) -> None:
    if asked_for:
        typer.echo(
            f"verl_padding {__version__} ({', '.join(map(_version_of, BESIDE))}, Python {platform.python_version()})"
        )
        raise typer.Exit


def _version_of(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Show versions and exit."),
    ] = False,
) -> None:
    """Batches of any size for verl: only its workers see the pads."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for metrics, rollouts, log and picture: a new or an empty one, or that of an earlier demo, "
            "whose files are replaced. No other file is touched."
        ),
    ] = Path("demo_out"),
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the model, the data and all random draws: the same seed, the same job.")
    ] = 0,
    stock: Annotated[bool, typer.Option("--stock", help="Use verl's own trainer and padding.")] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Train a vision model: sessions start with an image (extra: vision).")
    ] = False,
    pictures: Annotated[bool, typer.Option("--pictures", hidden=True)] = False,
) -> None:
    """Trains a tiny multi-turn agent on this machine's CPU: verl's trainer, Ray, TransferQueue, two FSDP2 ranks.

    Exit codes: 0 if the agent has learned its task, or if the steps are too few to tell; 1 if the job was refused; 2 if
    the command line cannot be read; 3 if the job ran to its end and the agent has not learned; if the job failed, its
    own.
    """
    from rich.console import Console

    from verl_padding.cli.demo import run_demo
    from verl_padding.errors import PaddingError

    try:
        if pictures:
            Console(stderr=True).print("--pictures is now called --images.")
        sys.exit(run_demo(steps=steps, out=out, stock=stock, images=images or pictures, seed=seed))
    except PaddingError as refusal:
        Console(stderr=True).print(str(refusal), style="red", markup=False, soft_wrap=True)
        sys.exit(1)


@app.command(epilog=PLAN_FORMS)
def plan(
    rows: Annotated[
        Path,
        typer.Argument(
            help="File of rows, or a rollout dump of verl; a folder of dumps (trainer.rollout_data_dir), each planned "
            "by itself; or - for standard input.",
        ),
    ],
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    mini_batch: Annotated[int, typer.Option(min=1, help="Prompts per optimizer step (ppo_mini_batch_size).")],
    n: Annotated[int, typer.Option(min=1, help="Rollouts per prompt (rollout.n).")],
    budget: Annotated[int, typer.Option(min=1, max=1 << 24, help="Most tokens of a micro-batch on one rank.")],
    strategy: Annotated[
        str, typer.Option(help="See padding.strategy.", metavar="|".join(STRATEGIES))
    ] = PaddingConfig.strategy,
    packer: Annotated[
        Packer,
        typer.Option(
            help="See padding.packer, whose default it has: verl leaves the micro-batches to verl's packer in the "
            "workers, plan plans them too."
        ),
    ] = PaddingConfig.packer,
    cost_model: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(COST_MODELS)}, a folder with the config.json of a model, or a checkpoint's "
            "padding_costs.json (padding.cost_model=measured)."
        ),
    ] = PaddingConfig.cost_model,
    sharing: Annotated[
        Sharing, typer.Option(help="chains: rows that extend each other are computed once (with --packer plan).")
    ] = PaddingConfig.sharing,
    compare: Annotated[bool, typer.Option("--compare", help="Also show stock verl's layout (slow).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw each step's ranks into this file, with --compare beside those of stock verl."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer that counts a rollout dump's tokens.")] = None,
) -> None:
    """Plans batches of rows: shows steps, ranks, micro-batches, pads, and how long ranks would wait for each other."""
    from verl_padding.cli.plan import PlanRequest, show_plan

    request = PlanRequest(
        path=rows,
        dp_size=dp,
        mini_batch=mini_batch,
        n=n,
        budget=budget,
        strategy=strategy,
        packer=packer,
        cost_model=cost_model,
        tokenizer=tokenizer,
        sharing=sharing,
    )
    sys.exit(show_plan(request, compare=compare, as_json=json, picture=picture))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs: the demo's, or the OUT of a recipe's script.")],
    picture: Annotated[Path, typer.Option(help="File for the picture.")] = Path("runs.png"),
) -> None:
    """Draws runs into one picture: reward, optimizer steps, gradient norm and pads of each step."""
    from verl_padding.cli.compare import compare_runs

    sys.exit(compare_runs(runs, picture))


@app.command()
def timeline(
    file: Annotated[Path, typer.Argument(help="File of a step, by padding.timing=true: <padding.timing_dir>/3.jsonl.")],
    picture: Annotated[
        Path | None, typer.Option(help="Draw ranks over time into this file: a bar for each micro-batch.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace into this file, which ui.perfetto.dev opens.")
    ] = None,
    update: Annotated[int, typer.Option(min=0, help="Local update of the step, from 0 (separate_async).")] = 0,
) -> None:
    """Shows what each worker call of a step took, by the clock: seconds, waiting, imbalance, memory."""
    from verl_padding.cli.timeline import show_timeline

    sys.exit(show_timeline(file, update=update, picture=picture, trace=trace))


@app.command()
def tiny_model(
    folder: Annotated[Path, typer.Argument(help="The model's folder: empty, or not there yet.")],
    family: Annotated[Family, typer.Option(help="Architecture; qwen3_vl sees images (extra: vision).")] = "qwen2",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Makes a tiny model with random weights and a tokenizer of bytes, to try an agent with on a CPU."""
    from verl_padding.cli.tiny_model import make_model

    sys.exit(make_model(folder, family, seed))


@app.command()
def rehearse(
    overrides: Annotated[list[str], typer.Argument(help="Hydra overrides of a job, as for verl.trainer.main_ppo.")],
    config_name: Annotated[str, typer.Option("--config-name", "-cn", help="Primary config, as for Hydra.")] = PRIMARY,
    config_path: Annotated[
        str, typer.Option("--config-path", "-cp", help="Folder of the primary config, as for Hydra.")
    ] = CONFIG_PATH,
    config_dir: Annotated[
        str | None, typer.Option("--config-dir", "-cd", help="One more folder of configs, as for Hydra.")
    ] = None,
    reply: Annotated[
        list[str] | None, typer.Option(help="A text that the model says, among noise and calls of tools.")
    ] = None,
    only: Annotated[Act, typer.Option(help="One of the two acts.")] = "all",
    without_tools: Annotated[bool, typer.Option("--without-tools", help="Load no tools.")] = False,
    without_rewards: Annotated[bool, typer.Option("--without-rewards", help="Score nothing in act 1.")] = False,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds that each act may take.")] = 300,
) -> None:
    """Runs a job small on this machine's CPU: its sessions on scripted replies, then a step with its model shrunk.

    The job's own data set, agent loops, tools and rewards are run. The exit code is 1 if something is wrong.
    """
    from rich.console import Console

    from verl_padding.cli.rehearse import rehearse as run

    job = JobArguments(
        overrides=tuple(overrides), config_name=config_name, config_path=config_path, config_dir=config_dir
    )
    sys.exit(
        run(
            job,
            console=Console(file=sys.stdout),
            replies=reply or [],
            only=only,
            with_tools=not without_tools,
            with_rewards=not without_rewards,
            timeout_s=timeout,
        )
    )


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides of a job, as for verl.trainer.main_ppo.")
    ] = None,
    config_name: Annotated[str, typer.Option("--config-name", "-cn", help="Primary config, as for Hydra.")] = PRIMARY,
    config_path: Annotated[
        str, typer.Option("--config-path", "-cp", help="Folder of the primary config, as for Hydra.")
    ] = CONFIG_PATH,
    config_dir: Annotated[
        str | None, typer.Option("--config-dir", "-cd", help="One more folder of configs, as for Hydra.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that was checked.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON, and nothing else.")] = False,
) -> None:
    """Checks whether the plug-in works, and whether a job can start on this machine. Ray is not started.

    The exit code is 1 if something is wrong.
    """
    from rich.console import Console

    from verl_padding.cli.doctor import diagnose

    job = JobArguments(
        overrides=tuple(overrides or ()), config_name=config_name, config_path=config_path, config_dir=config_dir
    )
    arguments = None if job == JobArguments() else job
    sys.exit(diagnose(arguments, console=Console(), verbose=verbose, as_json=json))


if __name__ == "__main__":
    app()
