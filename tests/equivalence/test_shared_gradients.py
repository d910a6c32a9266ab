"""Prefixes that are computed once give, in float64, the gradients of rows that are each computed
alone.

A plan with pads, tries and four ranks goes through verl's engine, which shares, in this process.
The reference is verl's own engine and loss on all real rows of a mini-batch at once, without a
plan, pads or sharing.
"""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from benchmarks.one_gpu.rows import plan as plan_rows
from benchmarks.one_gpu.rows import trained_rows
from tests.support.branching_rows import branching_rows
from tests.support.engine_in_process import (
    Actor,
    Critic,
    computed,
    loss_tokens,
    one_micro_batch,
    start_engine,
    train_as_planned,
)
from tests.support.loss_comparisons import DISTILLING, PACKING_MATTERS, POLICY_LOSSES
from tests.support.losses_on_rows import (
    MODES,
    QUICK_MODE,
    critic_loss,
    distilling_loss,
    policy_loss,
)
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.job.verl_losses import MEANS_OVER_ROWS
from verl_padding.pads.loss_weighting import LossWeighting, loss_factors
from verl_padding.worker.losses import RealRowsLoss, normalize_over_mini_batch

BUDGET = 48
NOMINAL = 7  # rows of a mini-batch as a configuration would say it: not those that are there
TOP_K = 4
CALL = "actor"


@pytest.fixture(scope="module")
def rows():
    """Rows that begin with all of another, or part, in a session and between those of a prompt."""
    return trained_rows(branching_rows(prompts=4, rollouts=2, turns=(4, 5), system=0))


@pytest.fixture(scope="module")
def plan(rows):
    """Two mini-batches, with pads."""
    found = plan_rows(rows, BUDGET, sharing="on", ranks=4, mini_prompts=2)
    assert (found.layouts[CALL].n_mini_batches, found.layouts[CALL].n_pads > 0) == (2, True)
    return found


@pytest.fixture(scope="module")
def engines(models):
    """One that shares, and verl's own, of the same weights."""
    return start_engine(Actor, models("qwen2"), shares=True), Actor(models("qwen2"))


@pytest.fixture(scope="module")
def critics(models):
    sharing, plain = (
        models("qwen2", AutoModelForTokenClassification, num_labels=1) for _ in range(2)
    )
    return start_engine(Critic, sharing, shares=True), Critic(plain)


def blind_to_the_last(loss):
    """A loss that gets NaN for the last output of each row, which belongs to whatever token is
    packed behind it."""

    def told(**given):
        if (
            "model_output" not in given
        ):  # verl's engine asks the loss of a top-k distillation for outputs
            return loss(**given)
        spoiled = {}
        for name, value in given["model_output"].items():
            values = value.values().clone()
            # Counts of top-k have no NaN.
            values[value.offsets()[1:] - 1] = (
                torch.nan if values.is_floating_point() else torch.iinfo(values.dtype).min
            )
            spoiled[name] = torch.nested.nested_tensor_from_jagged(values, value.offsets())
        loss_value, metrics = loss(**given | {"model_output": spoiled})
        assert loss_value.isfinite(), "the loss reads the last output of a row"
        return loss_value, metrics

    return told


def shared_gradients(engine, rows, plan, loss, **said):
    """Those of the plan, of a loss that reads no last output of a row; only tips and pads are
    computed."""
    before, figures, blind = engine.tokens, plan.figures[CALL], blind_to_the_last(loss)
    assert figures.sharing_factor > 1.3
    yield from train_as_planned(
        engine, rows, plan, CALL, blind, token_budget=BUDGET, global_batch_size=NOMINAL, **said
    )
    assert engine.tokens - before == figures.computed_tokens + 2 * plan.layouts[CALL].n_pads


def plain_gradients(engine, rows, plan, loss, denominator="rows", **said):
    """Those of all real rows of each mini-batch at once."""
    fields = list(rows.values())
    for ranks in plan.layouts[CALL].local_batches:
        rows_M = [fields[row] for local_batch in ranks for row in local_batch if row < len(fields)]
        n = NOMINAL if denominator == "nominal" else len(rows_M)
        at_once = one_micro_batch(rows_M, rows_M, **said | {"global_batch_size": n})
        yield computed(engine, loss, [at_once])[1]


def assert_same_gradients(got, want, tolerance=RELATIVE_FLOAT64):
    got_MN, want_MN = torch.stack([*got]), torch.stack([*want])
    assert want_MN.norm(dim=1).min() > 1e-3
    assert ((got_MN - want_MN).norm(dim=1) / want_MN.norm(dim=1)).max() <= tolerance


OF_ITS_OWN = ("vanilla", *MEANS_OVER_ROWS)
"""Losses that take what their rows are divided by in a way of their own, and one of those that do
not."""
LOSSES = [
    *[(name, QUICK_MODE, "rows") for name in POLICY_LOSSES if name not in PACKING_MATTERS],
    *[(name, QUICK_MODE, "nominal") for name in OF_ITS_OWN],
    *[("vanilla", mode, "rows") for mode in MODES if mode != QUICK_MODE],
]
"""Jobs whose loss depends on the packing share nothing; test_registered_losses.py has all modes of
all losses, without sharing."""


@pytest.mark.parametrize(("name", "mode", "denominator"), LOSSES)
def test_a_registered_loss_gives_the_gradients_of_rows_that_share_nothing(
    name, mode, denominator, engines, rows, plan
):
    sharing, plain = engines
    loss, divides_by_rows = policy_loss(mode, name), denominator == "rows"
    # verl's means of rows divide by the rows that they get, whatever they are told
    verls = loss if divides_by_rows else normalize_over_mini_batch(loss)
    want = plain_gradients(plain, rows, plan, verls, denominator)
    got = shared_gradients(sharing, rows, plan, RealRowsLoss(loss), divides_by_rows=divides_by_rows)
    assert_same_gradients(got, want)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("vanilla", "token-mean"), ("vanilla", QUICK_MODE), ("critic", QUICK_MODE)],
)
def test_every_session_weighs_what_it_weighs_where_nothing_is_shared(
    name, mode, engines, critics, rows, plan
):
    sharing, plain = critics if name == "critic" else engines
    weighed = RealRowsLoss(critic_loss(mode) if name == "critic" else policy_loss(mode, name))
    trained_R = [loss_tokens([row]) for row in rows.values()]
    equal_sessions = LossWeighting(mode=mode, by_session=True)
    factor_R = loss_factors(
        plan.layouts[CALL], list(rows), [1.0] * len(rows), trained_R, equal_sessions
    )
    said = {"factor_R": factor_R, "calculate_entropy": name != "critic"}
    got = shared_gradients(sharing, rows, plan, weighed, **said)
    said |= {"token_budget": 10 * BUDGET, "global_batch_size": NOMINAL}
    assert_same_gradients(got, train_as_planned(plain, rows, plan, CALL, weighed, **said))


def teachers(tokens):
    # The same for every row of as many tokens, and up to there for a longer one, but for the line
    # that verl fills in.
    draw = torch.Generator().manual_seed(3)
    return (
        torch.randn(200, 256, generator=draw, dtype=torch.float64)[:tokens]
        .log_softmax(-1)
        .topk(TOP_K)
    )


def taught_fields(tokens, *, use_topk):
    """What a teacher says of a row: its top-k, or the log-probs of the tokens alone."""
    values, indices = teachers(tokens)
    return (
        {"teacher_logprobs": values, "teacher_ids": indices}
        if use_topk
        else {"teacher_logprobs": values[:, :1]}
    )


@pytest.mark.parametrize(("name", "policy_gradient"), dict(DISTILLING).items())
def test_so_does_a_distilling_loss_whose_teacher_is_cut_with_the_rows(
    name, policy_gradient, engines, rows, plan
):
    loss = distilling_loss("token-mean", name, policy_gradient=policy_gradient)
    use_topk = loss.keywords["distillation_config"].distillation_loss.loss_settings.use_topk
    taught = {
        key: row | taught_fields(len(row["input_ids"]), use_topk=use_topk)
        for key, row in rows.items()
    }
    said = {"distillation_use_topk": use_topk}
    got = shared_gradients(engines[0], taught, plan, RealRowsLoss(loss), **said)
    want = plain_gradients(engines[1], taught, plan, loss, **said)
    assert_same_gradients(got, want, RELATIVE_FLOAT32 if use_topk else RELATIVE_FLOAT64)
