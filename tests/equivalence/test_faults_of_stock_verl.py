"""What stock verl's padding does wrong, on stock verl's own functions: why the plug-in is there.

Each test fails the day verl mends its fault, and tells what to do then. Pads, their order and the
advantages come from verl's own methods on the real TransferQueue, the update from verl's engine in
this process.
"""

import math
from collections import Counter
from importlib.metadata import version

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu

from tests.equivalence.zero_effect import (
    HALF,
    NOMINAL,
    error_of_loss,
    measure_estimator,
    pad_as_verl,
)
from tests.support.losses_on_rows import distilling_loss, policy_loss
from tests.support.rows_in_queue import put_rows
from tests.support.trainer_without_workers import padded_trainer
from tests.support.verl_config import compose_job

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

STOCK = get_trainer_cls("sync")


def assert_still(fault, what):
    assert fault, (
        f"verl {version('verl')} no longer does this: {what}. Take it out of docs/evidence.md, run "
        "`python -m tests.equivalence.zero_effect --keep` and `python -m "
        "benchmarks.results_page`, and delete this test."
    )


def balanced(n_rows, *, dp, actor, critic):
    """Of each rank's rows in verl's order, whether they are pads; the sizes are rows of a
    mini-batch."""
    trainer = padded_trainer(
        "algorithm.adv_estimator=gae",
        "critic.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={actor}",
        f"critic.ppo_mini_batch_size={critic}",
        "actor_rollout_ref.rollout.n=1",
        f"data.train_batch_size={math.lcm(actor, critic)}",
        dp_size=dp,
    )
    trainer.use_critic = critic != actor
    rows = put_rows([(5, 1 + row % 7) for row in range(n_rows)])
    tags = STOCK._balance_batch(trainer, rows, {}).tags
    pads = [bool(tag.get("is_padding")) for tag in tags]
    size = len(pads) // dp  # verl's dispatch cuts equal chunks
    return [pads[rank * size : (rank + 1) * size] for rank in range(dp)]


def real_rows_of_steps(pads_D, mini_batch):
    """Real rows of each optimizer step: verl's workers cut a rank's rows by this function, in their
    order."""
    local_batch, real_of_step = mini_batch // len(pads_D), Counter()
    for pads in pads_D:
        rows = TensorDict({"pad": torch.tensor(pads)}, batch_size=len(pads))
        cut = tu.make_iterator(
            rows,
            mini_batch_size=local_batch,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        for step, of_rank in enumerate(cut):
            real_of_step[step] += int((~of_rank["pad"]).sum())
    return [real_of_step[step] for step in sorted(real_of_step)]


def test_pads_gather_in_the_last_mini_batch():
    steps = real_rows_of_steps(balanced(121, dp=2, actor=120, critic=120), 120)
    assert_still(
        steps == [120, 1], f"121 rows make steps of {steps} real rows where a mini-batch has 120"
    )


def test_different_mini_batches_make_steps_without_a_real_row():
    pads_D = balanced(25, dp=4, actor=8, critic=12)
    actor, critic = real_rows_of_steps(pads_D, 8), real_rows_of_steps(pads_D, 12)
    assert sum(actor) == sum(critic) == 25
    assert_still(
        0 in actor and 0 in critic, f"25 rows make steps of {actor} and {critic} real rows"
    )


def test_the_seq_mean_modes_divide_by_rows_that_are_not_there():
    side = pad_as_verl("grpo", HALF)
    errors = {
        mode: error_of_loss(policy_loss(mode), side, "log_probs", at_once=True)
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    }
    assert errors.pop("token-mean") < 1e-12, "the comparison itself is off"
    # Gradients are those of HALF rows over NOMINAL ones.
    assert_still(
        all(error == pytest.approx(1 - HALF / NOMINAL, abs=1e-6) for error in errors.values()),
        f"gradients of {HALF} rows of {NOMINAL} are off by {errors}",
    )


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("bypass_mode", policy_loss("token-mean", "bypass_mode")),
        ("distillation k3", distilling_loss("token-mean", "k3")),
    ],
)
def test_some_losses_raise_an_error_on_a_micro_batch_of_pads(name, loss):
    error = error_of_loss(loss, pad_as_verl("grpo", HALF), "log_probs", at_once=True)
    assert_still(isinstance(error, str), f"{name} cannot be computed of pads alone")


@pytest.mark.parametrize(
    ("estimator", "n_rows"),
    [
        ("opo", HALF),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("grpo_passk", NOMINAL - 1), ("gpg", HALF))
        ),
    ],
)
def test_some_estimators_count_pads(estimator, n_rows):
    told = measure_estimator(estimator, n_rows)
    assert told["verl_padding"]["gradient"] < 1e-12, "the comparison itself is off"
    error = told["stock verl"]["gradient"]
    wrong = isinstance(error, str) or math.isnan(error) or error > 0.5
    assert_still(wrong, f"{estimator} with {NOMINAL - n_rows} pads is off by {error}")


def test_a_step_of_pads_alone_moves_weights_by_momentum():
    """By the betas of verl's config, 0.9 / (1 + 0.9) over the root of 0.999 / (1 + 0.999)."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    betas = compose_job().actor_rollout_ref.actor.optim.betas
    optimizer = torch.optim.AdamW([weight], betas=tuple(betas), weight_decay=0, eps=0)
    at = [0.0]
    for gradient in (1.0, 0.0):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        at.append(weight.item())
    share = (at[2] - at[1]) / at[1]
    assert share == pytest.approx(0.9 / 1.9 / math.sqrt(0.999 / 1.999))
    assert f"{share:.0%}" == "67%"
