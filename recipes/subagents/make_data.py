"""Data of the tiny task: 1 to 3 random symbols to add up, the same for the same seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from verl_padding.recipes.subagents.tasks import MAX_PARTS, SYMBOLS, TINY_SOURCE
from verl_padding.recipes.tiny_data import write_tiny_data


def write_sums(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Writes ``train.parquet`` and ``val.parquet``."""
    rng = random.Random(seed)

    def make_row(split: str, index: int) -> dict[str, Any]:
        parts = "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(1, MAX_PARTS)))
        return {
            "data_source": TINY_SOURCE,
            "prompt": [{"role": "user", "content": parts}],
            "ability": "delegation",
            "reward_model": {"style": "rule", "ground_truth": parts},
            "extra_info": {"split": split, "index": index},
        }

    return write_tiny_data(folder, make_row)
