"""Every policy and distillation loss that verl registers gives, with pads, the gradient that it gives without them.

The reference is verl's own ``ppo_loss``, on one rank, in one call for all real rows, with their number as
``global_batch_size``. Losses that choose tokens inside a micro-batch depend on how rows are packed: theirs is the same
micro-batches with the pads taken out.
"""

import pytest
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

from tests.equivalence.loss_comparisons import (
    PACKING_MATTERS,
    POLICY_LOSSES,
    Seeded,
    assert_the_gradient_is_that_of_a_batch_without_pads,
    assert_the_metrics_are_those_of_all_rows_at_once,
)
from tests.support.losses_on_rows import IDLE_RANK, LAYOUTS, MODES, SPREAD, distilling_loss, policy_loss


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_registered_loss_gives_the_gradient_of_a_batch_without_pads(name, mode, layout):
    if name in PACKING_MATTERS:
        loss = Seeded(policy_loss(mode, name))
        assert_the_gradient_is_that_of_a_batch_without_pads(loss, layout, packing_matters=True)
    else:
        assert_the_gradient_is_that_of_a_batch_without_pads(policy_loss(mode, name), layout)


@LAYOUTS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_metrics_of_a_registered_loss_are_those_of_all_real_rows_at_once(name, mode, layout):
    but = ("actor/pg_loss",) if name in PACKING_MATTERS else ()
    assert_the_metrics_are_those_of_all_rows_at_once(policy_loss(mode, name), layout, but=but)


@pytest.mark.parametrize(
    ("task_rewards", "layout"), [(True, SPREAD), (False, IDLE_RANK)], ids=["with rewards-spread", "alone-idle_rank"]
)
@pytest.mark.parametrize("policy_gradient", [True, False], ids=["policy gradient", "supervised"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(DISTILLATION_LOSS_REGISTRY))
def test_a_registered_distillation_loss_does_too(name, mode, policy_gradient, task_rewards, layout):
    if (name, policy_gradient) == ("k1", False):
        with pytest.raises(ValueError, match="incorrect"):  # verl's word: supervised, k1 knows nothing of the teacher
            distilling_loss(mode, name, policy_gradient=policy_gradient)
        return
    loss = distilling_loss(mode, name, policy_gradient=policy_gradient, task_rewards=task_rewards)
    assert_the_gradient_is_that_of_a_batch_without_pads(loss, layout)
    assert_the_metrics_are_those_of_all_rows_at_once(loss, layout)
