"""What pads cost on the rows of a demo: optimizer steps, pads and their tokens, beside what stock verl would append.

``python -m benchmarks.demo_pads demo_out`` reads what ``verl-padding demo --steps 60`` has left there.
"""

from __future__ import annotations

from pathlib import Path

import typer

from benchmarks.results import Keep, report
from verl_padding.job.metric_names import PAD_TOKENS_TOTAL
from verl_padding.runs.curves import RunCurves, stock_rule_of
from verl_padding.runs.report import read_metrics
from verl_padding.stock.padding import VERL_PAD_TOKENS


def main(run: Path, keep: Keep = False) -> None:
    """Counts the pads of a run, and what stock verl would have appended to its batches."""
    curves = RunCurves.read(run)
    assert not curves.is_stock, f"{run} is a run of stock verl"
    stock = curves.by_stock_rule(stock_rule_of(run))
    pad_tokens = sum(int(step[PAD_TOKENS_TOTAL]) for _, step in read_metrics(run))
    figures = {
        name: {"optimizer_steps": side.optimizer_steps, "pads": side.pads, "tokens_of_a_pad": tokens}
        for name, side, tokens in (
            ("verl_padding", curves, pad_tokens / sum(curves.pads)),
            ("stock verl, its rule", stock, VERL_PAD_TOKENS),
        )
    }
    report("demo_pads", {"real_rows": curves.real_rows} | figures, keep=keep)


if __name__ == "__main__":
    typer.run(main)
