"""The command ``verl-padding``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Batches of any size for verl: pads that no one else sees.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    # With a callback, typer keeps `demo` a command of its own, also while there is only one.
    return


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder for metrics, rollouts, log and picture; made anew.")] = Path(
        "demo_out"
    ),
    stock: Annotated[bool, typer.Option("--stock", help="verl's own trainer and padding, to compare.")] = False,
) -> None:
    """Trains a tiny multi-turn agent on this machine's CPU: verl's trainer, Ray, TransferQueue, two FSDP2 ranks."""
    from verl_padding.demo import run_demo

    sys.exit(run_demo(steps=steps, out=out, stock=stock))


if __name__ == "__main__":
    app()
