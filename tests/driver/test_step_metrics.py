"""The value of each metric under ``padding/`` on a plan and on laps made by hand."""

from dataclasses import replace

import pytest

from tests.plan.test_strategies import JOB
from tests.support.call_costs import costs_of
from tests.support.plan_oracles import layout_of_local_batches
from verl_padding.driver.step_metrics import plan_metrics, worker_metrics
from verl_padding.job.calls import ACTOR, CRITIC, LOG_PROB
from verl_padding.plan import BatchPlan, Layout
from verl_padding.plan.mini_batch_costs import score_layout

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
