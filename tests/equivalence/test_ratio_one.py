"""Before any weight has moved, an update computes the log-probs of the passes before it, bit by
bit.

A plan of several mini-batches, ranks and micro-batches goes through verl's engine in this process:
first a pass, in the engine's mode for evaluation and without gradients, then the update, with
verl's own loss and metrics.
"""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict

from benchmarks.one_gpu.rows import plan as plan_rows
from tests.equivalence.real_text import AUTOCAST, PASS, UPDATE, log_probs_of_a_pass
from tests.equivalence.real_text import engine_of as start
from tests.support.engine_in_process import cut_as_planned, trained_rows
from tests.support.losses_on_rows import policy_loss
from tests.support.sessions_that_grow import grown_sessions
from verl_padding.worker.losses import RealRowsLoss

BUDGET = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, AUTOCAST: torch.float32}

ROUNDING = {"float32": 1e-6, "bfloat16": 0.02}
"""What the mean of the log-ratio may be because a row has other rows beside it."""


@pytest.fixture(scope="module")
def rows():
    return trained_rows(grown_sessions([9, 2, 7, 3, 12, 2], prompts=4))


def planned(rows, sharing, packer="plan"):
    """Two mini-batches, and a pass that takes the update's micro-batches if they are the plan's."""
    shape = {"ranks": 2, "mini_prompts": 2, "has_pass": True}
    plan = plan_rows(rows, BUDGET, sharing=sharing, packer=packer, **shape)
    figures = plan.figures[UPDATE]
    assert plan.layouts[UPDATE].n_mini_batches == 2
    assert plan.layouts[UPDATE].n_pads > 0
    if packer == "plan":
        assert figures.sharing_factor > 1.5 if sharing == "on" else figures.micro_batches > 2
    return plan


def engine_of(dtype, sharing):
    # Wide enough that the CPU's kernels add up in an order that depends on the rows beside a row.
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).to(DTYPES[dtype])
    return start(model, dtype, shares=sharing != "off")


def log_probs_of(engine, rows, plan):
    """Those of the responses in a pass, by key."""
    return log_probs_of_a_pass(engine, cut_as_planned(rows, plan, PASS, 0, token_budget=BUDGET))


def metrics_of_an_update(engine, rows, plan, old, ref):
    """Of both mini-batches, before any weight moves, with the log-probs that two passes have found.

    All ranks of this process are added up as one.
    """
    rows = {
        key: row | {"old_log_probs": old[key], "ref_log_prob": ref[key]}
        for key, row in rows.items()
    }
    inner = policy_loss("token-mean")
    # verl's default, low_var_kl, is a square: of last bits it would be 0 in float32.
    object.__setattr__(inner.keywords["config"], "kl_loss_type", "kl")
    loss, metrics = RealRowsLoss(inner), {}
    for mini_batch in range(plan.layouts[UPDATE].n_mini_batches):
        # Other outputs than the pass asked for: log-probs must not depend on that.
        said = {"global_batch_size": 7, "calculate_entropy": False}
        for _, micro_batch in cut_as_planned(
            rows, plan, UPDATE, mini_batch, token_budget=BUDGET, **said
        ):
            value, output = engine.forward_step(micro_batch, loss, forward_only=False)
            value.backward()
            append_to_dict(metrics, output["metrics"])
    engine.take_gradient()
    return {name: value.aggregate() for name, value in metrics.items() if isinstance(value, Metric)}


@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param(AUTOCAST, marks=pytest.mark.slow)]
)
def test_the_ratio_is_one_where_a_pass_has_the_updates_micro_batches(dtype, sharing, rows):
    plan, engine = planned(rows, sharing), engine_of(dtype, sharing)
    old, of_reference = (log_probs_of(engine, rows, plan) for _ in range(2))
    metrics = metrics_of_an_update(engine, rows, plan, old, of_reference)
    exact = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "kl_loss")
    assert {name: metrics[name] for name in exact} == dict.fromkeys(exact, 0.0)
    assert metrics["actor/pg_loss"] != 0.0


def test_it_is_not_where_the_pass_has_micro_batches_of_its_own(rows):
    # Or the test above would show nothing about micro-batches.
    plan, engine = planned(rows, "off"), engine_of("float32", "off")
    by_verl = planned(rows, "off", packer="verl")
    old, of_reference = (log_probs_of(engine, rows, each) for each in (plan, by_verl))
    metrics = metrics_of_an_update(engine, rows, plan, old, of_reference)
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["kl_loss"] != 0.0
    metrics = metrics_of_an_update(engine, rows, plan, of_reference, old)
    assert metrics["actor/ppo_kl"] != 0.0
    assert metrics["kl_loss"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_the_default_packer_the_ratio_is_one_but_for_rounding(dtype, rows):
    # verl's packer cuts a pass into other micro-batches than the update.
    plan, engine = planned(rows, "off", packer="verl"), engine_of(dtype, "off")
    old = log_probs_of(engine, rows, plan)
    metrics = metrics_of_an_update(engine, rows, plan, old, old)
    assert 0.0 < abs(metrics["actor/ppo_kl"]) < ROUNDING[dtype]
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0
