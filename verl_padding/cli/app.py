"""The command ``verl-padding``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_padding.plan import COST_MODELS, STRATEGIES, Sharing
from verl_padding.verl_job.composition import CONFIG_PATH, JobArguments
from verl_padding.verl_job.known_verl import PRIMARY

app = typer.Typer(help="Batches of any size for verl: only its workers see the pads.", no_args_is_help=True)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for metrics, rollouts, log and picture. Those of an earlier demo are replaced; no other file "
            "is touched."
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


@app.command()
def plan(
    rows: Annotated[Path, typer.Argument(help="File of rows, one JSON object per line, or a rollout dump of verl.")],
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    mini_batch: Annotated[int, typer.Option(min=1, help="Prompts per optimizer step (ppo_mini_batch_size).")],
    n: Annotated[int, typer.Option(min=1, help="Rollouts per prompt (rollout.n).")],
    budget: Annotated[int, typer.Option(min=1, max=1 << 24, help="Most tokens of a micro-batch on one rank.")],
    strategy: Annotated[str, typer.Option(help="See padding.strategy.", metavar="|".join(STRATEGIES))] = "prompt",
    cost_model: Annotated[
        str, typer.Option(help=f"{', '.join(COST_MODELS)}, or a folder with the config.json of a model.")
    ] = "attention",
    sharing: Annotated[Sharing, typer.Option(help="chains: rows that extend each other are computed once.")] = "off",
    compare: Annotated[bool, typer.Option("--compare", help="Also show stock verl's layout (slow).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON, and nothing else.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw each step's ranks into this file.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer that counts a rollout dump's tokens.")] = None,
) -> None:
    """Plans a file's rows: shows steps, ranks, micro-batches, pads, and how long ranks would wait for each other."""
    from verl_padding.cli.plan import PlanRequest, show_plan

    request = PlanRequest(
        path=rows,
        dp_size=dp,
        mini_batch=mini_batch,
        n=n,
        budget=budget,
        strategy=strategy,
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
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that was looked at.")] = False,
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
