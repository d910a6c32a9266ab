"""The command ``verl-padding``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_padding.plan import STRATEGIES

app = typer.Typer(help="Batches of any size for verl: pads that no one else sees.", no_args_is_help=True)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for metrics, rollouts, log and picture. Those of an earlier demo are made anew; no other file "
            "is touched."
        ),
    ] = Path("demo_out"),
    seed: Annotated[
        int, typer.Option(min=0, help="Of the model, the data and all that is drawn: the same seed, the same job.")
    ] = 0,
    stock: Annotated[bool, typer.Option("--stock", help="verl's own trainer and padding, to compare.")] = False,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="A model that sees: sessions start with a picture (extra: vision).")
    ] = False,
) -> None:
    """Trains a tiny multi-turn agent on this machine's CPU: verl's trainer, Ray, TransferQueue, two FSDP2 ranks.

    Exit codes: 0 if it has learned its task, or if the steps are too few to tell; 3 if it ran to its end and has not
    learned; that of the job if the job failed, or 1 if it was refused; 2 for a command line that cannot be read.
    """
    from rich.console import Console

    from verl_padding.cli.demo import run_demo
    from verl_padding.errors import PaddingError

    try:
        sys.exit(run_demo(steps=steps, out=out, stock=stock, pictures=pictures, seed=seed))
    except PaddingError as refusal:
        Console(stderr=True).print(str(refusal), style="red", markup=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def plan(
    rows: Annotated[Path, typer.Argument(help="Rows, one JSON object a line; or a rollout dump of verl.")],
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    mini_batch: Annotated[int, typer.Option(min=1, help="Prompts of an optimizer step (ppo_mini_batch_size).")],
    n: Annotated[int, typer.Option(min=1, help="Rollouts a prompt (rollout.n).")],
    budget: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of a micro-batch on one rank.")],
    strategy: Annotated[str, typer.Option(help="As padding.strategy.", metavar="|".join(STRATEGIES))] = "prompt",
    cost_model: Annotated[
        str, typer.Option(help="tokens, attention, or a folder with the config.json of a model.")
    ] = "attention",
    compare: Annotated[bool, typer.Option("--compare", help="Stock verl's layout beside it (slow).")] = False,
    json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON, and nothing else.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw each step's ranks into this file.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Counts the tokens of a rollout dump.")] = None,
) -> None:
    """Plans the rows of a file: steps, ranks, micro-batches, pads, and how long ranks would wait for each other."""
    from verl_padding.cli.plan_command import PlanRequest, show_plan

    request = PlanRequest(
        path=rows,
        dp_size=dp,
        mini_batch=mini_batch,
        n=n,
        budget=budget,
        strategy=strategy,
        cost_model=cost_model,
        tokenizer=tokenizer,
    )
    sys.exit(show_plan(request, compare=compare, as_json=json, picture=picture))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs: the demo's, or the OUT of a recipe's script.")],
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("runs.png"),
) -> None:
    """Draws runs into one picture: reward, optimizer steps, gradient norm and pads of each step."""
    from rich.console import Console

    from verl_padding.errors import PaddingError
    from verl_padding.runs.curves import RunCurves, draw, table_of

    console = Console()
    try:
        curves = [RunCurves.read(folder) for folder in runs]
        draw(curves, picture)
    except PaddingError as refusal:
        Console(stderr=True).print(str(refusal), style="red", markup=False)
        sys.exit(1)
    console.print(table_of(curves))
    console.print(f"picture {picture}")


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides of a job, as for verl.trainer.main_ppo.")
    ] = None,
    config_name: Annotated[str, typer.Option(help="verl's config that the overrides are for.")] = "ppo_trainer",
) -> None:
    """Tells whether the plug-in is in, and whether a job is one that can run; exit code 1 if something is wrong."""
    from rich.console import Console

    from verl_padding.cli.doctor import diagnose

    sys.exit(diagnose(overrides or [], config_name=config_name, console=Console()))


if __name__ == "__main__":
    app()
