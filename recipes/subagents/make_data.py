"""Data of the tiny task, in verl's parquet form: ``python -m
verl_padding.recipes.subagents.make_data FOLDER``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from verl_padding.recipes.subagents.tasks import MAX_PARTS, SYMBOLS, TINY_SOURCE


def write_tiny_data(
    folder: Path, *, train: int = 2048, val: int = 64, seed: int = 0
) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``: 1 to 3 random symbols to add up, the same for
    the same seed."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, count in (("train", train), ("val", val)):
        rows = [_row(rng, name, index) for index in range(count)]
        paths.append(folder / f"{name}.parquet")
        pd.DataFrame(rows).to_parquet(paths[-1])
    return paths[0], paths[1]


def _row(rng: random.Random, split: str, index: int) -> dict:
    parts = "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(1, MAX_PARTS)))
    return {
        "data_source": TINY_SOURCE,
        "prompt": [{"role": "user", "content": parts}],
        "ability": "delegation",
        "reward_model": {"style": "rule", "ground_truth": parts},
        "extra_info": {"split": split, "index": index},
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the two files.")], seed: int = 0
) -> None:
    """Writes the data of the tiny task."""
    for path in write_tiny_data(folder, seed=seed):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
