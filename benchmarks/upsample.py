"""Pads into the real TransferQueue and out again: verl's ``upsample_batch_to_divisible_size`` beside ours.

    python -m benchmarks.upsample [--keep] [--json]

Rows as verl's agent loop writes them: of text, and with the experts that a mixture of 48 layers routed each token to.
Both sides put the same number of pads behind the same ten real rows and clear them, and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from benchmarks.results import AsJson, Keep, busy_cores, show, spread, tell
from tests.support.cluster import ray_and_queue

PAD_COUNTS = (10, 1_000, 10_000)
LENGTHS = [(100 + row, 200 + 3 * row) for row in range(10)]
LAYERS, TOP_K, EXPERTS = 48, 8, 128
EOS = 3


def kinds_of_rows() -> dict[str, dict[str, list[Any]]]:
    """Fields beside those of text."""
    import torch

    # int16, one (layer, slot) table a token, as vLLM reports them.
    experts = [torch.randint(0, EXPERTS, (sum(length), LAYERS, TOP_K), dtype=torch.int16) for length in LENGTHS]
    return {"text": {}, "routed experts": {"routed_experts": experts}}


def with_verl(batch: Any, pads: int) -> None:
    import transfer_queue as tq
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    padded = upsample_batch_to_divisible_size(batch, len(batch) + pads, EOS)
    assert len(padded) == len(batch) + pads
    tq.kv_clear(keys=padded.keys[len(batch) :], partition_id=batch.partition_id)


def with_ours(batch: Any, pads: int) -> None:
    from tests.support.padded_rows import upsample
    from verl_padding.pads.template import PadTemplate
    from verl_padding.pads.upsampling import strip

    plan: Any = SimpleNamespace(n_pads=pads, layouts={}, packer="verl")
    strip(upsample(batch, plan, PadTemplate(eos_token_id=EOS, length=2)).pads)


def timed(function: Callable[[Any, int], None], batch: Any, pads: int) -> float:
    started = time.perf_counter()
    function(batch, pads)
    return time.perf_counter() - started


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 5,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures all kinds of rows."""
    busy = busy_cores()
    figures = []
    with ray_and_queue(object_store_bytes=2_000_000_000):
        import transfer_queue as tq

        from tests.support.rows_in_queue import PARTITION, put_rows

        for kind, fields in kinds_of_rows().items():
            batch = put_rows(LENGTHS, **fields)
            for side in (with_verl, with_ours):
                side(batch, 10)  # warm
            for pads in PAD_COUNTS:
                turns = [(timed(with_verl, batch, pads), timed(with_ours, batch, pads)) for _ in range(repeats)]
                theirs, ours = [list(side) for side in zip(*turns, strict=True)]
                figures.append({"rows": kind, "pads": pads, "verl": theirs, "verl_padding": ours})
            tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    show(
        "seconds to put pads and clear them: median (least-most)",
        ["rows", "pads", "verl", "verl_padding", "verl / verl_padding"],
        [
            [
                it["rows"],
                f"{it['pads']:,}",
                spread(it["verl"]),
                spread(it["verl_padding"]),
                median(it["verl"]) / median(it["verl_padding"]),
            ]
            for it in figures
        ],
    )
    tell({"upsample": figures}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
