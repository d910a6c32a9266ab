"""Numbers to find, in verl's parquet form: ``python make_data.py FOLDER --top 15``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

RULES = (
    "You play a game. I think of a number from 1 to {top}, and you find it. After each guess I say "
    "higher or lower."
)


def write_data(folder: Path, *, top: int, seed: int = 0) -> None:
    """Writes ``train.parquet`` and ``val.parquet``. Any ``top`` rows that follow each other from a
    multiple of ``top`` on have each number once, so that no batch is easier than another."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, rounds in (("train", 200), ("val", 4)):
        numbers = [number for _ in range(rounds) for number in draw.sample(range(1, top + 1), top)]
        rows = [_row(number, top, split, index) for index, number in enumerate(numbers)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def _row(number: int, top: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "guess",
        "prompt": [
            {"role": "system", "content": RULES.format(top=top)},
            {"role": "user", "content": "Guess."},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": split, "index": index, "top": top},
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the two files.")],
    top: Annotated[int, typer.Option(min=1, help="The largest number.")] = 15,
    seed: int = 0,
) -> None:
    """Writes the two files."""
    write_data(folder, top=top, seed=seed)


if __name__ == "__main__":
    typer.run(main)
