"""What pads cost on the rows of a demo: optimizer steps, pads and their tokens, beside what stock verl would append.

``python -m benchmarks.demo_pads demo_out`` reads what ``verl-padding demo --steps 60`` has left there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import DictConfig, OmegaConf

from benchmarks.results import AsJson, Keep, report, show
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, PAD_TOKENS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.runs.curves import ACTOR_STEPS, read_curves
from verl_padding.runs.run_files import CONFIG
from verl_padding.stock.padding import VERL_PAD_TOKENS, StockRule


def main(
    run: Annotated[Path, typer.Argument(help="Folder of a demo, which is not a demo of stock verl.")],
    keep: Keep = False,
    as_json: AsJson = False,
) -> None:
    """Tells the pads of a run, and what stock verl would have appended to its batches."""
    curves, _ = read_curves(run)
    if PAD_TOKENS_TOTAL not in curves:
        raise typer.BadParameter(f"{run} is a run of stock verl.")
    config = OmegaConf.load(run / CONFIG)
    assert isinstance(config, DictConfig)
    rule = StockRule.of_config(config)
    names = (PAD_TOKENS_TOTAL, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL, ACTOR_STEPS)
    pad_tokens, pads, real_rows, steps = ([int(value) for value in curves[name].values()] for name in names)
    figures: dict[str, dict[str, Any]] = {
        "verl_padding": {
            "optimizer_steps": steps,
            "pads": pads,
            "tokens_of_a_pad": sum(pad_tokens) / sum(pads),
        },
        "stock verl, its rule": {
            "optimizer_steps": [rule.optimizer_steps(rows) for rows in real_rows],
            "pads": [rule.padded_rows(rows) - rows for rows in real_rows],
            "tokens_of_a_pad": VERL_PAD_TOKENS,
        },
    }
    rows = sum(real_rows)
    show(
        f"{len(steps)} batches of {rows} rows",
        ["", "optimizer steps", "pads / real rows", "tokens of a pad"],
        [
            [
                name,
                f"{min(of['optimizer_steps'])} to {max(of['optimizer_steps'])}",
                f"{sum(of['pads']) / rows:.1%}",
                f"{of['tokens_of_a_pad']:.0f}",
            ]
            for name, of in figures.items()
        ],
    )
    report({"real_rows": real_rows} | figures, benchmark=__file__, keep=keep, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
