"""Rows of one role are compared with those of their role alone, in the real TransferQueue."""

import pytest
import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainer

from tests.driver.test_samples import put as put_samples
from tests.equivalence.test_estimators_beside_pads import VERLS_LIMITS
from tests.support.rows_in_queue import PARTITION, put_rows, read_columns
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.driver.agent_roles import parts_by_role
from verl_padding.errors import PaddingDataError
from verl_padding.job.verl_losses import GROUPING

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

ROLES = {
    "a_0_0": "sub",
    "a_0_1": "sub",
    "a_0_2": "lead",
    "a_1_0": "sub",
    "a_1_1": "lead",
    "a_2_0": "lead",
    "b_0_0": "lead",
    "b_0_1": "sub",
    "b_1_0": "lead",
    "b_1_1": "sub",
}
"""Two prompts; sessions in which a lead comes first or last, and one whose lead is alone."""
RESPONSES = dict(zip(ROLES, (2, 1, 5, 3, 2, 4, 1, 2, 2, 3), strict=True))
REWARDS = {"a_0": 1.0, "a_1": 0.25, "a_2": -0.5, "b_0": 0.5, "b_1": 2.0}


def put(keys, **masks):
    """Rows with these keys as the trainer has them before advantages."""
    masks = {key: masks.get(key, [1] * RESPONSES[key]) for key in keys}
    return put_samples(masks, rewards=REWARDS, roles=ROLES)


def advantages_of(batch):
    columns = read_columns(batch, "advantages", "returns")
    rows = zip(*([row.tolist() for row in column] for column in columns), strict=True)
    found = dict(zip(batch.keys, map(list, rows), strict=True))
    tq.kv_clear(keys=list(batch.keys), partition_id=PARTITION)
    return found


@pytest.mark.parametrize("samples", ["row", "session"])
@pytest.mark.parametrize("estimator", sorted(set(GROUPING) - VERLS_LIMITS.keys()))
def test_advantages_are_to_the_bit_those_of_a_run_for_each_role(estimator, samples):
    settings = f"algorithm.adv_estimator={estimator}", f"padding.advantages={samples}"
    settings = *settings, "algorithm.use_kl_in_reward=true"
    by_prompt = padded_trainer(*settings)
    by_role = padded_trainer(*settings, "padding.baseline=role")
    batch = put(ROLES)
    by_role._compute_advantage(batch, {})
    got = advantages_of(batch)
    batch = put(ROLES)
    by_prompt._compute_advantage(batch, {})
    assert advantages_of(batch) != got
    for role in ("lead", "sub"):
        batch = put([key for key in ROLES if ROLES[key] == role])
        if samples == "row":
            PPOTrainer._compute_advantage(by_prompt, batch, {})
        else:
            by_prompt._compute_advantage(batch, {})
        want = advantages_of(batch)
        assert {key: got[key] for key in want} == want
        assert any(any(row) for row, _ in want.values())


def test_a_role_whose_last_row_is_not_trained_has_an_advantage():
    trainer = padded_trainer("algorithm.adv_estimator=grpo", "padding.baseline=role")
    batch = put(ROLES, a_0_1=[0])
    trainer._compute_advantage(batch, {})
    got = {key: advantages for key, (advantages, _) in advantages_of(batch).items()}
    assert got["a_0_0"] == [got["a_0_0"][0]] * 2
    assert got["a_0_0"][0] > 0
    assert got["a_0_1"] == [0.0]


def test_a_row_continues_the_nearest_of_its_role():
    batch = put(["a_0_0", "a_0_2", "a_0_1"])
    subs, lead = parts_by_role(batch, ["sub", "lead", "sub"], [None, 0, 1])
    assert (subs[0].keys, subs[1]) == (["a_0_0", "a_0_1"], [None, 0])
    assert (lead[0].keys, lead[1]) == (["a_0_2"], [None])


@pytest.mark.parametrize("role", [{}, {"role": None}, {"role": 3}, {"role": ""}])
def test_a_row_without_a_role_is_refused_with_its_key_before_any_call(role):
    trainer = padded_trainer("padding.baseline=role")
    said = [{"role": "lead"}, role, {"role": "lead"}, {"role": "sub"}]
    batch = put_rows([(2, 2)] * 4, ["a_0_0", "a_1_0", "b_0_0", "b_1_0"], extra_fields=said)
    with pytest.raises(PaddingDataError, match=r"^row 'a_1_0': extra_fields\['role'\] is "):
        trainer._balance_batch(batch, {})
    assert trainer.steps.current is None
    padded_trainer()._balance_batch(batch, {})
