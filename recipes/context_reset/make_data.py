"""Data of the tiny task, in verl's parquet form: ``python -m
verl_padding.recipes.context_reset.make_data FOLDER``."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from verl_padding.recipes.context_reset.tasks import PICTURE_SOURCE, SYMBOLS, TINY_SOURCE

SHORTEST_PATH, LONGEST_PATH = 1, 4
PICTURE_SIDE = 64
"""Pixels of an image's side."""


def write_tiny_data(
    folder: Path, *, train: int = 2048, val: int = 64, seed: int = 0, images: bool = False
) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``: random paths of 1 to 4 symbols, the same for
    the same seed.

    Args:
        images: whether the first symbol of a path is an image; needs Pillow.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, count in (("train", train), ("val", val)):
        rows = [_row(rng, name, index) for index in range(count)]
        if images:
            rows = [row | _image(row) for row in rows]
        paths.append(folder / f"{name}.parquet")
        pd.DataFrame(rows).to_parquet(paths[-1])
    return paths[0], paths[1]


def _row(rng: random.Random, split: str, index: int) -> dict:
    path = [rng.randrange(len(SYMBOLS)) for _ in range(rng.randint(SHORTEST_PATH, LONGEST_PATH))]
    return {
        "data_source": TINY_SOURCE,
        "prompt": [{"role": "user", "content": "".join(SYMBOLS[symbol] for symbol in path)}],
        "ability": "memory",
        "reward_model": {
            "style": "rule",
            "ground_truth": "".join(str(symbol + 1) for symbol in path),
        },
        "extra_info": {"split": split, "index": index},
    }


def _image(row: dict) -> dict:
    """Fields that differ in a row whose first symbol is an image: a dark square for a, a bright one
    for b."""
    from PIL import Image

    first = int(row["reward_model"]["ground_truth"][0]) - 1
    brightness = 255 * first // (len(SYMBOLS) - 1)
    file = io.BytesIO()
    Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE), (brightness,) * 3).save(file, "PNG")
    return {
        "data_source": PICTURE_SOURCE,
        "prompt": [{"role": "user", "content": "<image>"}],
        "images": [{"bytes": file.getvalue()}],
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the two files.")],
    seed: int = 0,
    images: bool = False,
) -> None:
    """Writes the data of the tiny task."""
    for path in write_tiny_data(folder, seed=seed, images=images):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
