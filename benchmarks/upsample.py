"""Pads into the real TransferQueue and out again: verl's ``upsample_batch_to_divisible_size`` beside ours.

    python -m benchmarks.upsample

Text rows as verl's agent loop writes them. Both sides put the same number of pads behind the same ten real rows and
clear them; the two take turns, and each time is the median of the repeats. Needs Ray on this machine.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from tests.pads.rows_in_queue import PARTITION, put_rows
from verl_padding.pads.queue import strip, upsample
from verl_padding.pads.template import PadTemplate

PAD_COUNTS = (10, 1_000, 10_000)
REPEATS = 3
REAL_ROWS = 10
EOS = 3


def with_verl(batch: KVBatchMeta, pads: int) -> None:
    padded = upsample_batch_to_divisible_size(batch, len(batch) + pads, EOS)
    assert len(padded) == len(batch) + pads
    tq.kv_clear(keys=padded.keys[len(batch) :], partition_id=PARTITION)


def with_ours(batch: KVBatchMeta, pads: int) -> None:
    plan: Any = SimpleNamespace(n_pads=pads, layouts={})
    strip(upsample(batch, plan, PadTemplate(eos_token_id=EOS, pad_length=2)))


def timed(function: Callable[[KVBatchMeta, int], None], batch: KVBatchMeta, pads: int) -> float:
    started = time.perf_counter()
    function(batch, pads)
    return time.perf_counter() - started


def main() -> None:
    folder = tempfile.mkdtemp(prefix="vp", dir="/tmp")  # Ray's sockets want a short path
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        batch = put_rows([(100 + row, 200 + 3 * row) for row in range(REAL_ROWS)])
        table = Table(title=f"seconds to put pads and clear them, median of {REPEATS} (spread)")
        for column in ("pads", "verl", "verl_padding", "verl / verl_padding"):
            table.add_column(column, justify="right")
        timed(with_verl, batch, 10), timed(with_ours, batch, 10)  # warm both
        for pads in PAD_COUNTS:
            pairs = [(timed(with_verl, batch, pads), timed(with_ours, batch, pads)) for _ in range(REPEATS)]
            theirs, ours = [list(side) for side in zip(*pairs, strict=True)]
            cells = [f"{median(side):.3f} ({min(side):.3f}-{max(side):.3f})" for side in (theirs, ours)]
            table.add_row(f"{pads:,}", *cells, f"{median(theirs) / median(ours):.1f}")
        Console().print(table)
        tq.close()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
