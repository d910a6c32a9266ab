"""The value of each metric under ``padding/``, on a plan and on rows made by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from benchmarks.one_gpu.rows import nested
from tests.plan.test_strategies import JOB
from tests.support.call_costs import costs_of
from tests.support.plan_oracles import layout_of_local_batches
from tests.support.trained_rows import MadeRow, trained_rows
from verl_padding.driver.step_metrics import (
    TrainedRows,
    advantage_metrics,
    plan_metrics,
    session_metrics,
    worker_metrics,
)
from verl_padding.job.calls import ACTOR, CRITIC, LOG_PROB
from verl_padding.plan import BatchPlan, Layout
from verl_padding.plan.call_costs import score_layout

TOKENS, PAD_TOKENS = [10, 20, 30, 40, 5], 2
ROWS_MDK = {
    # 5, 6 and 7 are pads. A row costs its tokens:
    ACTOR: ((((0,), (1,)), ((2,), (5,))), (((3, 6),), ((4, 7),))),  # 10, 20; 30, 2; 40 + 2; 5 + 2
    CRITIC: ((((0, 1, 2),), ((3, 4, 5),)),),  # 10 + 20 + 30; 40 + 5 + 2
    LOG_PROB: ((((0, 3), (5,)), ((1,), (2, 4))),),  # 10 + 40, 2; 20, 30 + 5
}
BUDGETS = {ACTOR: 50, CRITIC: 60, LOG_PROB: 60}
OF_THE_PLAN = {
    "padding/real_rows/total": 5,
    "padding/pad_rows/total": 3,  # those of the call that takes most
    "padding/pad_tokens/total": 3 * 2,
    "padding/pad_tokens/share": 6 / 105,
    "padding/actor/optimizer_steps/total": 2,
    "padding/actor/mini_batch_real_rows/min": 2,
    "padding/actor/mini_batch_real_rows/max": 3,
    "padding/actor/pad_rows/total": 3,
    "padding/actor/imbalance": (32 + 42) / (111 / 2),
    "padding/critic/optimizer_steps/total": 1,
    "padding/critic/mini_batch_real_rows/min": 5,
    "padding/critic/mini_batch_real_rows/max": 5,
    "padding/critic/pad_rows/total": 1,
    "padding/critic/imbalance": 60 / (107 / 2),
}
OF_ITS_MICRO_BATCHES = {
    "padding/actor/micro_batch_imbalance": (30 + 20 + 42) / (111 / 2),
    "padding/critic/micro_batch_imbalance": 60 / (107 / 2),
    "padding/log_prob/micro_batch_imbalance": (50 + 35) / (107 / 2),
    "padding/log_prob/micro_batches": 2,
    "padding/log_prob/packing_efficiency": 105 / (2 * 2 * 60),
    "padding/actor/packing_efficiency": 105 / (3 * 2 * BUDGETS["actor"]),
    "padding/critic/packing_efficiency": 105 / (1 * 2 * BUDGETS["critic"]),
}
OF_THE_WORKERS = {
    "padding/actor/micro_batches": 3.0,
    "padding/critic/micro_batches": 4.0,
}


def hand_made(packer):
    layouts = {
        call: Layout(n_rows=len(TOKENS), rows_MDK=rows_MDK) for call, rows_MDK in ROWS_MDK.items()
    }
    if packer == "verl":
        layouts = {
            call: layout_of_local_batches(len(TOKENS), layout.local_batches)
            for call, layout in layouts.items()
        }
    of_call = {"dp_size": 2, "cost_model": "tokens"}
    figures = {
        call: score_layout(layout, costs_of(TOKENS, token_budget=BUDGETS[call], **of_call))
        for call, layout in layouts.items()
    }
    return BatchPlan(job=replace(JOB, packer=packer), layouts=layouts, figures=figures)


@pytest.mark.parametrize(
    ("packer", "want"), [("verl", OF_THE_PLAN), ("plan", OF_THE_PLAN | OF_ITS_MICRO_BATCHES)]
)
def test_the_metrics_of_a_plan_are_those_counted_by_hand(packer, want):
    told = plan_metrics(hand_made(packer), TOKENS, PAD_TOKENS)
    assert told == pytest.approx(want, rel=1e-12)


def test_the_metrics_of_the_workers_are_theirs_under_names_of_ours():
    metrics = {
        "actor/padding/micro_batches": 3.0,
        "actor/lr": 0.1,
        "critic/padding/micro_batches": 4.0,
    }
    assert worker_metrics(metrics) == pytest.approx(OF_THE_WORKERS, rel=1e-12)
    assert metrics.keys() == {"actor/lr"}, "ours leave verl's metrics, and verl's stay"


def test_a_row_has_the_mean_advantage_of_its_trained_tokens_and_all_of_its_score():
    columns = {
        "advantages": [[1.0, 9.0, -3.0], [2.0, 2.0], [0.0]],
        "rm_scores": [[0.0, 1.0, 0.5], [0.0, 2.0], [3.0]],
    }
    fields = {name: nested(map(torch.tensor, column)) for name, column in columns.items()}
    masks = [torch.tensor(mask) for mask in ([1, 0, 1], [0, 0], [1])]
    batch = KVBatchMeta(
        keys=["a_0_0", "a_1_0", "b_0_0"], tags=[{"seq_len": tokens} for tokens in (5, 4, 2)]
    )
    rows = TrainedRows.from_fields(batch, TensorDict(fields, 3), masks)
    assert (rows.response_R.tolist(), rows.trained_R.tolist()) == ([3, 2, 1], [2, 0, 1])
    np.testing.assert_equal(rows.advantage_R, [-1.0, np.nan, 0.0])
    assert rows.has_advantage_R.tolist() == [True, False, False]
    assert rows.reward_R.tolist() == [1.5, 2.0, 3.0]


def test_a_session_counts_once_with_the_score_of_its_last_row():
    first = {
        "a_0_10": MadeRow(score=1),
        "a_0_2": MadeRow(score=7),
        "a_1_0": MadeRow(score=0),
    }
    second = {"b_0_0": MadeRow(score=0.5)}
    assert session_metrics([trained_rows(first), trained_rows(second)]) == {
        "padding/session/score/mean": 0.5,
        "padding/session/arrived/total": 3,
        "padding/session/rows/mean": 4 / 3,
        "padding/session/rows/max": 2,
    }


PROMPTS = {
    # All right, and the normalized advantages of one session are not exactly 0.
    "a_0_0": MadeRow(score=1.0),
    "a_1_0": MadeRow(score=1.0, advantage=1e-9),
    # All wrong; the row before the last has another score, and counts for nothing.
    "b_0_0": MadeRow(score=1.0),
    "b_0_1": MadeRow(score=-1.0),
    "b_1_0": MadeRow(score=-1.0),
    # Equal, and neither the best nor the worst of the step.
    "c_0_0": MadeRow(score=0.5),
    "c_1_0": MadeRow(score=0.5),
    # One right, one wrong, in two rows.
    "d_0_0": MadeRow(score=1.0, advantage=1.0),
    "d_1_0": MadeRow(score=-1.0, advantage=-1.0),
    "d_1_1": MadeRow(score=-1.0, advantage=-1.0, response="..", mask="00"),
    # One session has arrived alone.
    "e_0_0": MadeRow(score=1.0),
}


@pytest.mark.parametrize("local_updates", [1, 2])
def test_rows_and_prompts_that_teach_nothing_are_counted(local_updates):
    updates = [PROMPTS]
    if local_updates == 2:
        updates = [
            {key: row for key, row in PROMPTS.items() if (key < "c") is first}
            for first in (True, False)
        ]
    assert advantage_metrics(list(map(trained_rows, updates))) == {
        "padding/rows/zero_advantage/share": 8
        / 11,  # all but a_1_0, d_0_0 and d_1_0: d_1_1 has no trained token
        "padding/prompts/zero_advantage/share": 3 / 5,
    }
