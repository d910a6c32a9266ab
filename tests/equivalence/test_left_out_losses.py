"""Every loss that verl registers, without the rows that have no advantage, and with old log-probs
of its own."""

from functools import partial

import pytest
import torch
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss

from tests.equivalence.test_registered_losses import BYPASS
from tests.support.loss_comparisons import PACKING_MATTERS, POLICY_LOSSES, seeded
from tests.support.losses_on_rows import (
    MODES,
    PAD,
    Rows,
    in_each_mode,
    nested,
    policy_loss,
    run_as_verl_does,
)
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.job.verl_losses import ZERO_WITHOUT_ADVANTAGE
from verl_padding.worker.losses import RealRowsLoss

MULTIPLIED = ZERO_WITHOUT_ADVANTAGE
IDLE = (1, 3)
ALL, WITHOUT = [[[0, 1], [2, PAD]], [[3, 4], [PAD]]], [[[0], [2, PAD]], [[4, PAD], [PAD]]]
EACH_MODE = pytest.mark.parametrize("mode", MODES)
EACH_LOSS = pytest.mark.parametrize("name", POLICY_LOSSES)


def rows_of(*, masked=False, scale=1.0):
    """Rows of which two have no advantage, or no trained token; ``scale`` makes the others' ratios
    leave the clip."""
    rows = Rows(*(IDLE if masked else ()))
    for number, row in enumerate(rows.fields):
        row["old_log_probs"] = (
            row["output"][len(row["prompts"]) - 1 : -1] + scale * row["old_log_probs"]
        )
        if number in IDLE and not masked:
            row["advantages"] = torch.zeros_like(row["advantages"])
    return rows


def with_and_without(loss, rows, denominator="rows", *, at_once=False):
    """Gradients and metrics of all rows, and of those that are not idle, in several micro-batches
    or in one."""
    wrapped = RealRowsLoss(loss)
    every, some = ([[[0, 1, 2, 3, 4]]], [[[0, 2, 4]]]) if at_once else (ALL, WITHOUT)
    run = partial(run_as_verl_does, wrapped, rows, denominator=denominator)
    return [run(every, "log_probs"), run(some, "log_probs", dropped=IDLE)]


def farthest(all_rows, without, rows):
    """How far gradients are from each other, relative to the largest; those of rows that are not
    computed are 0."""
    zeros = [torch.zeros_like(row["output"]) for row in rows.fields]
    want, got = (
        [zero if g is None else g for g, zero in zip(of, zeros, strict=True)]
        for of in (all_rows, without)
    )
    largest = max(float(gradient.abs().max()) for gradient in want)
    assert largest > 0
    return max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True)) / largest


def assert_same(loss, rows, denominator="rows"):
    (want, of_all), (got, of_some) = with_and_without(loss, rows, denominator)
    assert farthest(want, got, rows) <= RELATIVE_FLOAT64
    assert of_some["actor/pg_loss"] == pytest.approx(
        of_all["actor/pg_loss"], rel=RELATIVE_FLOAT64, abs=1e-15
    )


@pytest.mark.parametrize("denominator", ["rows", pytest.param("nominal", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "mode"), in_each_mode(MULTIPLIED))
@pytest.mark.parametrize("masked", [False, True], ids=["no advantage", "no trained token"])
def test_without_zero_advantage_rows_an_admitted_loss_and_its_gradients_are_the_same(
    name, mode, denominator, masked
):
    rows = rows_of(masked=masked)
    assert_same(policy_loss(mode, name, terms=False), rows, denominator)


@EACH_LOSS
def test_a_loss_is_admitted_just_where_zero_advantage_rows_add_nothing(name):
    found = []
    for scale in (0.1, 1.0, 3.0):
        rows = rows_of(scale=scale)
        loss = policy_loss("token-mean", name, terms=False)
        loss = seeded(loss) if name in PACKING_MATTERS else loss
        (want, _), (got, _) = with_and_without(loss, rows, at_once=True)
        found.append(farthest(want, got, rows))
    assert (max(found) <= RELATIVE_FLOAT64) == (name in MULTIPLIED), found


@pytest.mark.parametrize("preset", BYPASS)
def test_zero_advantage_rows_add_nothing_whatever_a_bypass_corrects_or_rejects(preset):
    loss = policy_loss(
        "seq-mean-token-mean", "bypass_mode", terms=False, rollout_correction=BYPASS[preset]
    )
    rows = rows_of(scale=3e-4)  # within the narrowest bounds of a rejection, if not in all rows
    for row in rows.fields:
        row["rollout_log_probs"] = row["old_log_probs"]
    assert_same(loss, rows)


@pytest.mark.parametrize("name", [*MULTIPLIED, "a bypass that rejects"])
def test_a_metric_has_verls_name_just_where_it_is_verls_of_all_rows(name):
    settings = {"name": name}
    if name not in MULTIPLIED:
        rejection = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
        settings = {"name": "bypass_mode", "rollout_correction": rejection}
    loss = policy_loss("token-mean", **settings, terms=False)
    for scale in (0.3, 1.0, 3.0):
        rows = rows_of(scale=scale)
        (_, of_all), (_, of_some) = with_and_without(loss, rows)
        assert {each.removesuffix("_computed") for each in of_some} == set(of_all)
        # No such job computes the entropy.
        for each in (set(of_all) & set(of_some)) - {"actor/entropy_loss"}:
            assert of_some[each] == pytest.approx(of_all[each], rel=RELATIVE_FLOAT32), each
    assert name == "gpg" or "actor/ppo_kl_computed" in of_some


@EACH_MODE
def test_the_entropy_loss_is_the_entropy_of_the_pass(mode):
    for masked in (False, True):
        rows = rows_of(masked=masked)
        _, metrics = run_as_verl_does(RealRowsLoss(policy_loss(mode)), rows, ALL, "log_probs")
        lengths = [(len(row["prompts"]), row["output"] ** 2) for row in rows.fields]
        entropy = nested(values[prompt - 1 : -1] for prompt, values in lengths).to_padded_tensor(
            0.0
        )
        mask = nested(row["response_mask"] for row in rows.fields).to_padded_tensor(0)
        # verl: PPOTrainer._compute_old_log_prob
        want = agg_loss(loss_mat=entropy, loss_mask=mask, loss_agg_mode=mode, loss_scale_factor=8)
        assert metrics["actor/entropy_loss"] == pytest.approx(float(want), rel=RELATIVE_FLOAT32)


@pytest.mark.parametrize("terms", [True, False], ids=["with KL and entropy", "alone"])
@pytest.mark.parametrize(
    ("name", "mode"),
    # A bypass has no such pass.
    in_each_mode(name for name in POLICY_LOSSES if name != "bypass_mode"),
)
def test_the_updates_own_log_probs_give_the_gradients_of_a_pass(name, mode, terms):
    loss = RealRowsLoss(seeded(policy_loss(mode, name, terms=terms)))
    want, metrics = run_as_verl_does(loss, rows_of(scale=0.0), ALL, "log_probs")
    own = run_as_verl_does(loss, rows_of(scale=1.0), ALL, "log_probs", takes_own_log_probs=True)
    assert max(float(gradient.abs().max()) for gradient in want) > 0
    assert all(map(torch.equal, own[0], want))
    assert own[1] == metrics
