"""An update of real FSDP2 workers: stock verl against the plan, turn by turn.

    python -m benchmarks.train_step [--keep] [--json]

The rows of ``long_tailed.jsonl``: 24 prompts of 8 sessions, of 1 to 5 rows. Two ranks, a Qwen2 of two layers, verl's
own worker, engine and loss. Stock verl pads and balances with its trainer's own ``_balance_batch``. The time of
``update_actor`` is reported, with that of planning and of pads beside it, the most memory that a worker held while it
ran, and the tokens that were wasted: those of pads, and what fills rows up to the longest of their micro-batch. The
sides take turns, in one order and the other, each from the model's weights, on the same rows, put anew. The gradient
norm of each optimizer step is kept: a step without a gradient ends the benchmark.

- At verl's number of optimizer steps: ``padding=lcm``, micro-batches by verl's packer and by the plan.
- At the configured number, prompts / ppo_mini_batch_size: ``padding=prompt``.
- What packing is compared with elsewhere: one row a micro-batch, and a fixed number of rows, padded to the longest of
  them (``use_dynamic_bsz=False``, ``use_remove_padding=False``), both by stock verl.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from transfer_queue import KVBatchMeta

from benchmarks.results import AsJson, Keep, busy_cores, report, show, spread
from benchmarks.two_ranks import take_turns, two_ranks
from benchmarks.updates import Side, StepSize, put_trained, update_of
from verl_padding.plan.row_keys import row_key

ROWS = Path(__file__).parent / "long_tailed.jsonl"
HIDDEN = 256
SIZE = StepSize(prompts=24, sessions=8, mini_prompts=8, budget=2048)
SIDES = (
    Side(name="stock verl", strategy=None),
    Side(name="lcm, verl's packer", strategy="lcm"),
    Side(name="lcm, plan's", strategy="lcm", packer="plan"),
    Side(name="prompt, plan's", strategy="prompt", packer="plan"),
    Side(name="stock verl, one row a micro-batch", strategy=None, micro_batch_rows=1),
    Side(name="stock verl, 4 padded rows a micro-batch", strategy=None, micro_batch_rows=4, packs=False),
)


def put_batch(prompts: int = SIZE.prompts) -> KVBatchMeta:
    """The rows of the first prompts of the file, as :func:`put_lengths` puts them."""
    rows = [json.loads(line) for line in ROWS.read_text().split("\n") if line]
    first = list(dict.fromkeys(row["prompt"] for row in rows))[:prompts]
    rows = [row for row in rows if row["prompt"] in first]
    lengths = [(row["prompt_tokens"], row["response_tokens"]) for row in rows]
    seen: dict[tuple[str, int], int] = {}
    keys = []
    for row in rows:
        session = row["prompt"], row["session"]
        seen[session] = seen.get(session, -1) + 1
        keys.append(row_key(row["prompt"], row["session"], seen[session]))
    return put_lengths(lengths, keys)


def put_lengths(lengths: Sequence[tuple[int, int]], keys: list[str]) -> KVBatchMeta:
    """Rows of so many tokens, prompt and response, with all that an actor update reads; the same each time."""
    from tests.support.rows_in_queue import put_rows

    torch.manual_seed(0)
    batch = put_rows(lengths, keys)
    return put_trained(batch.keys, [response for _, response in lengths], batch.tags)


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all sides.")] = 5,
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Measures all sides, after a round to warm up."""
    busy = busy_cores()
    with two_ranks(HIDDEN, SIZE.budget) as workers:
        record = take_turns(
            workers, SIDES, lambda side: update_of(workers, put_batch(), side, SIZE), range(repeats + 1), "rounds"
        )
    stock = [took["update"] for took in record[SIDES[0].name]]
    show(
        "seconds of an update, median (least-most); ratios round by round",
        ["side", "steps", "pads", "wasted tokens", "peak MiB", "plan and pads", "update", "stock verl / side"],
        [
            [
                name,
                took[0]["steps"],
                took[0]["pads"],
                f"{took[0]['wasted_tokens']:.1%}",
                round(median(it["memory_gib"] for it in took) * 1024),
                spread([it["before"] for it in took]),
                spread([it["update"] for it in took], 2),
                spread([theirs / it["update"] for theirs, it in zip(stock, took, strict=True)]),
            ]
            for name, took in record.items()
        ],
    )
    report({"sides": record}, benchmark=__file__, keep=keep, as_json=as_json, busy=busy)


if __name__ == "__main__":
    typer.run(main)
