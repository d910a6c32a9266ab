"""Gradients of sessions whose rows repeat sampled tokens, each trained once, in every loss of
verl's that is a sum over tokens, however sessions are split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prefix_sharing.test_repeated_tokens import masks_trained_once
from tests.support.loss_comparisons import POLICY_LOSSES
from tests.support.losses_on_rows import MODES, PAD, Rows, policy_loss, run_as_verl_does
from tests.support.plan_oracles import layout_of_local_batches
from tests.support.split_sessions import sessions, split
from tests.support.tolerance import RELATIVE_FLOAT64
from verl_padding.job.verl_losses import MEANS_OVER_ROWS, NOT_SUMS
from verl_padding.pads.loss_weighting import LossWeighting, loss_factors
from verl_padding.plan.row_keys import session_of_key
from verl_padding.worker.losses import RealRowsLoss

OF_SEQUENCES = {"gspo", *MEANS_OVER_ROWS}
"""Losses whose ratio is that of a row, so that a session's pieces have others than the whole."""
DRAWN = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages", "output")


class SplitRows(Rows):
    """Rows of split sessions: what losses read of a token is the same wherever it stands."""

    def __init__(self, rows, masks, factor_R):
        self.fields, self.n_real, self.masked = [], len(rows), ()
        self.factor_R = factor_R
        for row, mask in zip(rows, masks, strict=True):
            prompt, response = len(row.prompt), len(row.response)
            fields = self._row(prompt, response, torch.Generator().manual_seed(0))
            for place, action in enumerate(row.actions):
                name = session_of_key(row.key), action
                draw = torch.Generator().manual_seed(sum(map(ord, f"{name}" * 7)))
                token = self._row(1, 1, draw)
                for field in DRAWN:
                    at = prompt + place - 1 if field == "output" else place
                    fields[field][at] = token[field][0]
            self.fields.append(fields | {"response_mask": mask, "loss_mask": mask})


def gradients(loss, mode, rows, masks):
    """Of the output of each action, added up over the rows that have it; sessions weigh the
    same."""
    layout = layout_of_local_batches(len(rows), [[tuple(range(len(rows)))]])
    weighting = LossWeighting(mode=mode, by_session=True)
    tokens_R = [int(mask.sum()) for mask in masks]
    factor_R = loss_factors(
        layout, [row.key for row in rows], [1.0] * len(rows), tokens_R, weighting
    )
    half = len(rows) // 2
    ranks = [[[*range(half), PAD]], [[*range(half, len(rows))]]]
    leaf_R, _ = run_as_verl_does(
        RealRowsLoss(loss), SplitRows(rows, masks, factor_R), ranks, "log_probs"
    )
    found = {}
    for row, leaf in zip(rows, leaf_R, strict=True):
        for place, action in enumerate(row.actions):
            if action is not None:
                name = session_of_key(row.key), *action
                at = len(row.prompt) + place - 1
                found[name] = found.get(name, 0.0) + float(leaf[at])
    return found


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - OF_SEQUENCES - set(NOT_SUMS)))
@settings(max_examples=5)
@given(data=st.data(), mode=st.sampled_from(MODES))
def test_the_gradient_is_that_of_tokens_that_stand_once(name, data, mode):
    drawn = data.draw(sessions(said=True))
    rows = [row for session in drawn for row in data.draw(split(session, said=True))]
    # verl's losses take no row without a response.
    rows = [row for row in rows if row.response]
    loss, whole = policy_loss(mode, name), [session.in_one_row() for session in drawn]
    got = gradients(loss, mode, rows, masks_trained_once(rows, said=True))
    once = gradients(loss, mode, whole, [torch.tensor(row.mask) for row in whole])
    assert any(got.values())
    assert got == pytest.approx(once, rel=RELATIVE_FLOAT64, abs=1e-15)
