"""Data of the tiny task, in verl's parquet form: ``python -m
verl_padding.recipes.every_call.make_data FOLDER``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from verl_padding.recipes.every_call.tasks import DOORS, TINY_SOURCE, Doors


def write_tiny_data(
    folder: Path, *, train: int = 2048, val: int = 64, seed: int = 0
) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``: prizes behind random doors, the same for the
    same seed."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, count in (("train", train), ("val", val)):
        rows = [_row(str(rng.randint(1, DOORS)), name, index) for index in range(count)]
        paths.append(folder / f"{name}.parquet")
        pd.DataFrame(rows).to_parquet(paths[-1])
    return paths[0], paths[1]


def _row(prize: str, split: str, index: int) -> dict:
    return {
        "data_source": TINY_SOURCE,
        "prompt": Doors(prize).messages(),
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": prize},
        "extra_info": {"split": split, "index": index},
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the two files.")], seed: int = 0
) -> None:
    """Writes the two files, and prints their names."""
    for path in write_tiny_data(folder, seed=seed):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
