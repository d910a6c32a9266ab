"""Real rows of which no token is trained leave the loss of the others as it is, for every loss that verl registers.

The gradient is that of verl's own loss, called once for all rows, which counts such rows in its denominators. The
metrics are those that verl's loss has of the other rows alone.
"""

import math

import pytest
import torch
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
from verl.utils.metric import Metric

from tests.equivalence.loss_comparisons import NOT_ADDITIVE, PACKING_MATTERS, POLICY_LOSSES, Seeded
from tests.support.losses_on_rows import MODES, PAD, Rows, critic_loss, distilling_loss, policy_loss, run_as_verl_does
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.worker.loss_metrics import names_of_sums
from verl_padding.worker.losses import MICRO_BATCHES, RealRowsLoss

# [rank][micro-batch] -> rows, of which 1 and 3 have no trained token.
LAYOUTS = {
    "a micro-batch": [[[0, 2], [1, 3]], [[4], [PAD]]],
    "a micro-batch, beside a pad": [[[0], [1, PAD]], [[2, 4], [PAD, 3]]],
    "a rank": [[[1], [3, PAD]], [[0, 2], [4]]],
    "a micro-batch's part": [[[0, 1], [2, PAD]], [[3, 4], [PAD]]],
}
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


class MaskedRows(Rows):
    """Rows of which some have no trained token, as an agent loop gives them, or as rejection leaves them."""

    def __init__(self, *masked, rejected=False):
        super().__init__()
        for row in masked:
            zeros = torch.zeros_like(self.fields[row]["response_mask"])
            self.fields[row] |= {"response_mask": zeros} | ({} if rejected else {"loss_mask": zeros})
        self.masked = masked

    def others(self, layout):
        """The same micro-batches without the pads and the rows that have no trained token."""
        ranks = [[[row for row in micro if self.trains(row)] for micro in rank] for rank in layout]
        return [[micro for micro in rank if micro] for rank in ranks]


def gradients_of_verl(loss, rows, layout, output_name):
    def without_metrics(**kwargs):  # verl cannot add them up where ranks have different numbers of micro-batches
        return loss(**kwargs)[0], {}

    return run_as_verl_does(without_metrics, rows, layout, output_name, nominal=rows.n_real)[0]


def assert_that_the_others_train_alike(loss, layout, output_name="log_probs", *, packing_matters=False, rejected=False):
    rows = MaskedRows(1, 3, rejected=rejected)
    at_once = rows.others(layout) if packing_matters else [[list(range(rows.n_real))]]
    want = gradients_of_verl(loss, rows, at_once, output_name)
    got, metrics = run_as_verl_does(RealRowsLoss(loss, "rows"), rows, layout, output_name)
    for row, (padded, plain) in enumerate(zip(got, want, strict=True)):
        padded = torch.zeros_like(rows.fields[row]["output"]) if padded is None else padded
        plain = torch.zeros_like(padded) if plain is None else plain
        assert plain.isfinite().all()
        assert (plain.abs().max() == 0) == (row in rows.masked), "a row that trains has a gradient, and no other"
        torch.testing.assert_close(padded, plain, rtol=RELATIVE_FLOAT64, atol=1e-15)

    every, trained = range(rows.n_real), [row for row in range(rows.n_real) if rows.trains(row)]
    shape = {"dp_size": 1, "real_rows": rows.n_real, "reporting_ranks": 1, "nominal": rows.n_real}
    of_all, of_others = (
        loss(
            **dict(
                zip(("model_output", "data"), rows.micro_batch(some, rows.leaves(), output_name, **shape), strict=True)
            )
        )[1]
        for some in (every, trained)
    )
    # Losses are divided by all rows, means by the tokens or rows that train.
    want = of_others | {name: of_all[name] for name in names_of_sums(of_all)}
    assert metrics.keys() - {MICRO_BATCHES} == want.keys()
    but = ("actor/pg_loss", "actor/pg_clipfrac") if packing_matters else ()
    compared = [name for name in want if not name.endswith((*NOT_ADDITIVE, *but))]
    assert len(compared) >= 3
    for name in compared:
        value = want[name].aggregate() if isinstance(want[name], Metric) else want[name]
        assert math.isclose(metrics[name], value, rel_tol=RELATIVE_FLOAT32, abs_tol=1e-12), name


@EACH_LAYOUT
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_registered_policy_loss_trains_the_others_as_without_such_rows(name, mode, layout):
    matters = name in PACKING_MATTERS
    loss = policy_loss(mode, name)
    assert_that_the_others_train_alike(Seeded(loss) if matters else loss, layout, packing_matters=matters)


@EACH_LAYOUT
@pytest.mark.parametrize("mode", MODES)
def test_rows_whose_tokens_are_all_rejected_are_such_rows(mode, layout):
    assert_that_the_others_train_alike(policy_loss(mode), layout, rejected=True)


DISTILLING = [
    (name, policy_gradient)
    for name in sorted(DISTILLATION_LOSS_REGISTRY)
    for policy_gradient in (True, False)
    if (name, policy_gradient) != ("k1", False)  # refused by verl: supervised, k1 knows nothing of the teacher
]


@pytest.mark.parametrize("layout", list(LAYOUTS.values())[1:3], ids=list(LAYOUTS)[1:3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "policy_gradient"), DISTILLING)
def test_a_registered_distillation_loss_does_too(name, policy_gradient, mode, layout):
    assert_that_the_others_train_alike(distilling_loss(mode, name, policy_gradient=policy_gradient), layout)


@EACH_LAYOUT
@pytest.mark.parametrize("mode", MODES)
def test_so_does_the_value_loss(mode, layout):
    assert_that_the_others_train_alike(critic_loss(mode), layout, "values")


LOSSES = {
    **dict.fromkeys(POLICY_LOSSES, policy_loss),
    **dict.fromkeys({name for name, policy_gradient in DISTILLING if not policy_gradient}, distilling_loss),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["critic", *sorted(LOSSES)])
def test_a_mini_batch_without_a_trained_token_has_losses_and_gradients_of_zero(name, mode):
    output_name = "values" if name == "critic" else "log_probs"
    loss = RealRowsLoss(critic_loss(mode) if name == "critic" else LOSSES[name](mode, name), "rows")
    layout = [[[0, 1], [2, PAD]], [[3, 4], [PAD]]]
    rows = MaskedRows(*range(5))
    for known in (set(), {f"{output_name} loss", "other"}):
        loss._losses = known
        gradients, metrics = run_as_verl_does(loss, rows, layout, output_name)
        assert all(gradient is None or gradient.abs().max() == 0 for gradient in gradients)
        assert metrics == {MICRO_BATCHES: 2} | dict.fromkeys(known, 0.0)

    _, trained = run_as_verl_does(loss, Rows(), layout, output_name)
    _, metrics = run_as_verl_does(loss, rows, layout, output_name)
    assert {name for name in metrics if name.endswith("_loss") or name.endswith("/loss")} >= {
        name for name in trained if name.endswith(("pg_loss", "vf_loss", "kl_loss", "entropy_loss", "/loss"))
    }
    assert set(metrics.values()) <= {0.0, 2.0}
