"""Sessions that weigh the same however many rows they were split into, against the formula."""

import pytest
import torch

from tests.equivalence.loss_comparisons import POLICY_LOSSES
from tests.support.losses_on_rows import LAYOUTS, PAD, Rows, policy_loss, run_as_verl_does
from tests.support.tolerance import RELATIVE_FLOAT64
from verl_padding.pads.columns import SESSION_ROWS, SESSIONS
from verl_padding.trainer.losses import RealRowsLoss
from verl_padding.verl_job.job_reader import NOT_BY_ROWS

SEQ_MEAN_MODES = ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SESSION_OF = [0, 0, 0, 1, 2]
"""Session of each of the five rows: one of three rows, two of one."""
N_SESSIONS = 3


class SessionRows(Rows):
    """Rows that also say how many rows their session has."""

    def micro_batch(self, rows, leaves, output_name, **shape):
        output, data = super().micro_batch(rows, leaves, output_name, **shape)
        split = [0 if row is PAD else SESSION_OF.count(SESSION_OF[row]) for row in rows]
        data[SESSION_ROWS] = torch.tensor(split)
        data[SESSIONS] = torch.full((len(rows),), N_SESSIONS)
        return output, data


def gradients_of_the_rows(loss, rows: Rows) -> list[list[torch.Tensor]]:
    """Gradient of each row's own loss, on one rank, alone in its mini-batch."""
    gradients = []
    for row in range(rows.n_real):
        leaves = rows.leaves()
        output, data = rows.micro_batch(
            [row], leaves, "log_probs", dp_size=1, real_rows=1, reporting_ranks=1, nominal=1
        )
        loss(model_output=output, data=data, dp_group=None)[0].backward()
        gradients.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    return gradients


def weighted(gradients, weights):
    return [sum(w * row[leaf] for w, row in zip(weights, gradients, strict=True)) for leaf in range(len(gradients))]


@LAYOUTS
@pytest.mark.parametrize("mode", SEQ_MEAN_MODES)
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - set(NOT_BY_ROWS)))
def test_every_session_weighs_the_same(name, mode, layout):
    rows, loss = SessionRows(), policy_loss(mode, name)
    # 1 / S x 1 / k_s for each row of session s.
    weights = [1 / N_SESSIONS / SESSION_OF.count(session) for session in SESSION_OF]
    want = weighted(gradients_of_the_rows(loss, rows), weights)
    got, metrics = run_as_verl_does(RealRowsLoss(loss, "rows", "session"), rows, layout, "log_probs")
    assert metrics
    for got_leaf, want_leaf in zip(got, want, strict=True):
        torch.testing.assert_close(got_leaf, want_leaf, rtol=RELATIVE_FLOAT64, atol=1e-15)


def test_the_nominal_denominator_counts_the_configured_sessions():
    rows, loss = SessionRows(), policy_loss("seq-mean-token-mean", "vanilla")
    layout = [[[0, PAD], [1, 2]], [[PAD, PAD], [3, 4]]]
    by_rows, _ = run_as_verl_does(RealRowsLoss(loss, "rows", "session"), rows, layout, "log_probs")
    nominal, _ = run_as_verl_does(RealRowsLoss(loss, "nominal", "session"), rows, layout, "log_probs", nominal=7)
    for a, b in zip(by_rows, nominal, strict=True):
        torch.testing.assert_close(a * N_SESSIONS, b * 7, rtol=RELATIVE_FLOAT64, atol=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_that_are_no_sum_over_rows_are_known_by_name(name):
    rows, loss = Rows(), RealRowsLoss(policy_loss("seq-mean-token-mean", name), "rows").inner
    # More than the rows that are there: the loss must divide by what it is told.
    nominal = 7
    want = weighted(gradients_of_the_rows(loss, rows), [1 / nominal] * rows.n_real)
    leaves = rows.leaves()
    output, data = rows.micro_batch(
        range(rows.n_real), leaves, "log_probs", dp_size=1, real_rows=5, reporting_ranks=1, nominal=nominal
    )
    torch.manual_seed(0)
    loss(model_output=output, data=data, dp_group=None)[0].backward()
    by_rows = all(torch.allclose(leaf.grad, row, rtol=1e-9, atol=1e-15) for leaf, row in zip(leaves, want, strict=True))
    assert by_rows == (name not in NOT_BY_ROWS)
