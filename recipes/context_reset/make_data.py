"""Data of the tiny task: random paths of 1 to 4 symbols, the same for the same seed."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

from verl_padding.recipes.context_reset.tasks import PICTURE_SOURCE, SYMBOLS, TINY_SOURCE
from verl_padding.recipes.tiny_data import write_tiny_data

SHORTEST_PATH, LONGEST_PATH = 1, 4
PICTURE_SIDE = 64
"""Pixels of an image's side."""


def write_paths(folder: Path, *, seed: int = 0, images: bool = False) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``.

    Args:
        images: whether the first symbol of a path is an image; needs Pillow.
    """
    rng = random.Random(seed)

    def make_row(split: str, index: int) -> dict[str, Any]:
        row = _row(rng, split, index)
        return row | _image(row) if images else row

    return write_tiny_data(folder, make_row)


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
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


def _image(row: dict[str, Any]) -> dict[str, Any]:
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
