"""Data of the tiny task: prizes behind random doors, the same for the same seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from verl_padding.recipes.every_call.tasks import DOORS, TINY_SOURCE, Doors
from verl_padding.recipes.tiny_data import write_tiny_data


def write_doors(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``."""
    rng = random.Random(seed)

    def make_row(split: str, index: int) -> dict[str, Any]:
        prize = str(rng.randint(1, DOORS))
        return {
            "data_source": TINY_SOURCE,
            "prompt": Doors(prize).messages(),
            "ability": "search",
            "reward_model": {"style": "rule", "ground_truth": prize},
            "extra_info": {"split": split, "index": index},
        }

    return write_tiny_data(folder, make_row)
