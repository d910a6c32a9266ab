"""Data of a tiny task, in verl's parquet form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

ROWS = {"train": 2048, "val": 64}


def write_tiny_data(
    folder: Path, make_row: Callable[[str, int], dict[str, Any]]
) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``.

    Args:
        make_row: makes a row of a split, ``train`` or ``val``, from its number; is called in their
            order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}.parquet" for split in ROWS}
    for split, path in paths.items():
        pd.DataFrame([make_row(split, index) for index in range(ROWS[split])]).to_parquet(path)
    return paths["train"], paths["val"]
