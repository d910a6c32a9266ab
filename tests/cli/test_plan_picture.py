"""Pictures of plans: bars are as long as micro-batches take."""

import numpy as np
import pytest

from tests.cli.test_plan_command import write_rows
from verl_padding.cli import plan_picture
from verl_padding.cli.planned_batch import PlannedBatch
from verl_padding.cli.rows_file import read_batches
from verl_padding.job.calls import ACTOR
from verl_padding.plan import Job, Update
from verl_padding.plan.measured_cost import MeasuredCost, micro_batch_cost
from verl_padding.runs import charts

COST = MeasuredCost(handling_s=0.02, per_token_s=2e-5, per_square_s=5e-9, per_pair_s=2e-8)


def test_by_measured_costs_bars_and_table_have_pairs_of_rows_and_the_handling_of_micro_batches(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(charts, "save_chart", lambda figure, path: drawn.append(figure))
    write_rows(path := tmp_path / "rows.jsonl")
    update = Update(
        dp_size=4,
        token_budget=1000,
        prompts_per_mini_batch=3,
        cost_model=COST,
        mini_batch_setting="--mini-batch",
        budget_setting="--budget",
    )
    job = Job(
        strategy="prompt",
        prompts=3,
        sessions_per_prompt=2,
        sessions_setting="--n",
        updates={ACTOR: update},
        inference={},
        packer="plan",
    )
    file = PlannedBatch.of(read_batches(path, None)[0], job)
    laid = file.planned
    plan_picture.draw_layouts({"plan": laid}, tmp_path / "plan.png")
    tokens_R = np.array([*file.batch.rows.tokens_R, *[2] * file.plan.n_pads])
    together = 0
    for axes, step, rows_DK in zip(drawn[0].axes, laid.steps, laid.rows_MDK, strict=True):
        by_clock = [[micro_batch_cost(COST, tokens_R[rows]) for rows in rows_K] for rows_K in rows_DK]
        slowest = sum(map(max, zip(*by_clock, strict=True)))
        assert step.micro_slowest == pytest.approx(slowest)
        end = max(bar.get_x() + bar.get_width() for bar in axes.patches)
        assert end * laid.costs.of(1000) == pytest.approx(slowest)
        together += sum(len(rows) > 1 for rows_K in rows_DK for rows in rows_K)
    assert together > 4, "rows were meant to be beside others"
