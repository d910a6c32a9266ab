"""What pads cost on the rows of a demo: optimizer steps, pads and their tokens, beside what stock
verl would append.

``python -m benchmarks.demo_pads demo_out`` reads what ``verl-padding demo --steps 60`` has left
there.
"""

from __future__ import annotations

from pathlib import Path

import typer
from omegaconf import DictConfig, OmegaConf

from benchmarks.results import Keep, report
from verl_padding.cli.curves import ACTOR_STEPS, StockRule, read_curves
from verl_padding.cli.stock_layout import pad_tokens_of_verl
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.record.run_files import CONFIG

PAD_TOKENS = "padding/pad_tokens/total"


def main(run: Path, keep: Keep = False) -> None:
    """Counts the pads of a run, and what stock verl would have appended to its batches."""
    curves, _ = read_curves(run)
    assert PAD_TOKENS in curves, f"{run} is a run of stock verl"
    config = OmegaConf.load(run / CONFIG)
    assert isinstance(config, DictConfig)
    rule = StockRule.from_config(config)
    names = (PAD_TOKENS, PAD_ROWS_TOTAL, REAL_ROWS_TOTAL, ACTOR_STEPS)
    pad_tokens, pads, rows, steps = (
        [int(value) for value in curves[name].values()] for name in names
    )
    figures = {
        "verl_padding": {
            "optimizer_steps": steps,
            "pads": pads,
            "tokens_of_a_pad": sum(pad_tokens) / sum(pads),
        },
        "stock verl, its rule": {
            "optimizer_steps": [rule.optimizer_steps(n) for n in rows],
            "pads": [rule.padded_rows(n) - n for n in rows],
            "tokens_of_a_pad": pad_tokens_of_verl(),
        },
    }
    report("demo_pads", {"real_rows": rows} | figures, keep=keep)


if __name__ == "__main__":
    typer.run(main)
