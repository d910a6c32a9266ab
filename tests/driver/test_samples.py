"""Rows without a trained token count nowhere as rows, by verl's own methods in the real
TransferQueue."""

from functools import cache

import pytest
import torch
import transfer_queue as tq
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from tests.equivalence.test_estimators_beside_pads import CRITIC, RESULTS, VERLS_LIMITS
from tests.equivalence.test_estimators_beside_pads import computed as computed_of
from tests.support.rows_in_queue import PARTITION, put_rows, queue_content, read_columns
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.pads.prompt_order import ordered_uid
from verl_padding.pads.upsampling import strip
from verl_padding.plan.row_keys import session_of_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

CORRECTION = "algorithm.rollout_correction"


@cache
def trainer_of(*settings_of_job):
    return padded_trainer("algorithm.use_kl_in_reward=true", *settings_of_job)


def put(masks, *, rewards, kl=None, roles=None):
    """Rows with these masks, whose other numbers depend on their keys alone."""
    columns = {}
    for key, mask in masks.items():
        draw = torch.Generator().manual_seed(sum(map(ord, key * 3)) + len(mask))
        old, rollout, reference, values = torch.rand(4, len(mask), generator=draw)
        score = torch.zeros(len(mask))
        score[-1] = rewards[session_of_key(key)]
        fields = {
            "response_mask": torch.tensor(mask),
            "loss_mask": torch.tensor(mask),
            "rm_scores": score,
            "old_log_probs": old,
            "rollout_log_probs": rollout,
            "ref_log_prob": reference if kl is None else old - kl,
            "values": values,
            "extra_fields": {"role": roles[key] if roles else "solver"},
        }
        for name, value in fields.items():
            columns.setdefault(name, []).append(value)
    return put_rows([(2, len(mask)) for mask in masks.values()], list(masks), **columns)


def computed(trainer, masks, **rows):
    """Results of each row, the coefficient of the in-reward KL after the step, and metrics."""
    batch = put(masks, **rows)
    outcome = computed_of(trainer, batch)
    assert outcome.error is None
    tq.kv_clear(keys=list(batch.keys), partition_id=PARTITION)
    return outcome.rows, outcome.kl_coefficient, outcome.metrics


@st.composite
def sessions_with_emptied_rows(draw):
    """Masks of the rows of two prompts with two or three sessions; each session trains a token."""
    masks = {}
    for uid in "pq":
        for session in range(draw(st.integers(2, 3))):
            # Of a row's tokens one at least is trained, or none.
            emptied = draw(st.lists(st.booleans(), max_size=3))
            emptied.insert(draw(st.integers(0, len(emptied))), False)
            for index, is_empty in enumerate(emptied):
                mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
                masks[f"{uid}_{session}_{index}"] = [0] * len(mask) if is_empty else [*mask, 1]
    return masks


REWARDS = {"p_0": 1.0, "p_1": 0.0, "p_2": 0.3, "q_0": -0.5, "q_1": 0.25, "q_2": 2.0}
SAMPLES = st.sampled_from(["row", "session"])


@pytest.mark.parametrize("estimator", sorted(set(ADV_ESTIMATOR_REGISTRY) - VERLS_LIMITS.keys()))
@settings(max_examples=6)
@given(masks=sessions_with_emptied_rows(), samples=SAMPLES)
def test_an_emptied_row_changes_nothing_that_verl_computes_of_others(estimator, samples, masks):
    trainer = trainer_of(
        f"algorithm.adv_estimator={estimator}",
        f"padding.advantages={samples}",
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_rs=seq_mean_k2",
        f"{CORRECTION}.rollout_rs_threshold=0.2",
        *CRITIC.get(estimator, []),
    )
    train = {key: mask for key, mask in masks.items() if any(mask)}
    got, coefficient, metrics = computed(trainer, masks, rewards=REWARDS)
    want, coefficient_without, metrics_without = computed(trainer, train, rewards=REWARDS)
    assert coefficient == pytest.approx(coefficient_without)
    assert coefficient != 0.2
    assert metrics == pytest.approx(metrics_without, rel=1e-5, abs=1e-6, nan_ok=True)
    assert len(metrics) > 10
    for key, fields in got.items():
        if key in train:
            assert fields.keys() == want[key].keys() == set(RESULTS)
            for name, values in fields.items():
                assert values == pytest.approx(want[key][name], rel=1e-5, abs=1e-5), (key, name)
        elif samples == "row":
            assert not any(fields["advantages"])


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo"])
def test_a_session_without_a_trained_token_is_a_sample_and_no_row(estimator):
    """Its outcome is one of its prompt; its KL, of which nothing is trained, is none."""
    trainer = trainer_of(f"algorithm.adv_estimator={estimator}", "padding.advantages=row")
    masks = {"p_0_0": [1, 1], "p_1_0": [0, 0], "p_1_1": [0], "q_0_0": [1], "q_1_0": [1]}
    masks["q_2_0"] = [0]
    rows, _, metrics = computed(trainer, masks, rewards=REWARDS, kl=0.0)
    assert metrics["actor/reward_kl_penalty"] == 0
    got = {key: rows[key]["advantages"] for key in ("p_0_0", "q_0_0", "q_1_0")}
    # Scores of p are 1 and 0; of q -0.5, 0.25 and 2, the last one without a trained token.
    match estimator:
        case "grpo":
            want = [0.5 / 0.5**0.5, (-0.5 - 1.75 / 3) / 1.2829, (0.25 - 1.75 / 3) / 1.2829]
        case "rloo":
            want = [1.0, -0.5 - 2.25 / 2, 0.25 - 1.5 / 2]
        case "opo":  # whose baseline weighs by tokens, of which untrained samples have none
            want = [0.0, -0.375, 0.375]
        case _:
            # Less the means of 0.5 and 1.75 / 3, and whitened over the four trained tokens.
            values = torch.tensor([0.5, 0.5, -0.5 - 1.75 / 3, 0.25 - 1.75 / 3])
            whitened = (values - values.mean()) / values.std()
            want = whitened[1:].tolist()
    assert [row[0] for row in got.values()] == pytest.approx(want, rel=1e-3)
    assert not any(any(rows[key]["advantages"]) for key in ("p_1_0", "p_1_1", "q_2_0"))


def test_a_batch_without_a_trained_token_has_advantages_of_zero_and_no_kl():
    for estimator in ("rloo", "reinforce_plus_plus_baseline", "opo"):
        trainer = trainer_of(f"algorithm.adv_estimator={estimator}")
        rows, coefficient, metrics = computed(
            trainer, {"p_0_0": [0], "p_1_0": [0, 0]}, rewards=REWARDS
        )
        assert [fields["advantages"] for fields in rows.values()] == [[0.0], [0.0, 0.0]]
        assert (coefficient, metrics) == (0.2, {})


ROLES = st.fixed_dictionaries(
    {}, optional={f"{uid}_{n}_0": st.lists(st.integers(0, 1), min_size=1, max_size=2)
                  for uid in "pq" for n in range(3)}
)  # fmt: skip


@pytest.mark.parametrize(
    "estimator",
    sorted(set(ADV_ESTIMATOR_REGISTRY) - VERLS_LIMITS.keys() - {"gae", "reinforce_plus_plus"}),
)
@settings(max_examples=8)
@given(masks=ROLES.filter(bool), samples=SAMPLES)
def test_a_role_never_ends_a_job_however_few_its_samples_are(estimator, samples, masks):
    trainer = trainer_of(
        f"algorithm.adv_estimator={estimator}",
        f"padding.advantages={samples}",
        "padding.baseline=role",
    )
    rows, _, _ = computed(trainer, masks, rewards=REWARDS, kl=0.0)
    n_trained = sum(map(sum, masks.values()))
    for key, fields in rows.items():
        assert torch.tensor(fields["advantages"]).isfinite().all()
        if not any(masks[key]):
            assert not any(fields["advantages"])
            continue
        alone = sum(other[0] == key[0] for other in rows) == 1
        trained = [a for a, m in zip(fields["advantages"], masks[key], strict=True) if m]
        if estimator == "reinforce_plus_plus_baseline":
            assert n_trained > 1 or trained == [0.0], "one token is its own mean"
        elif alone and estimator not in ("gpg", "rloo_vectorized"):
            reward = REWARDS[session_of_key(key)]
            assert trained == pytest.approx([reward] * len(trained), rel=1e-5)


def test_verl_counts_samples_without_the_emptied_rows_of_a_step():
    uid = ordered_uid(7, 0)
    keys = [f"{uid}_{session}_{index}" for session in (0, 1) for index in (0, 1)]
    masks = dict(zip(keys, ([1], [0], [0], [0, 0]), strict=True))
    trainer, metrics = padded_trainer(), {}
    batch = put(masks, rewards={session_of_key(key): 1.0 for key in keys})
    trainer._balance_batch(batch, metrics)
    trainer.steps.hide_rows_without_loss(batch)
    left = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if "is_padding" not in tag]
    assert left == [keys[0], keys[3]], "the last row of a session that trains nothing is a sample"
    strip(trainer.steps.current.pads)
    assert not any(tag.get("is_padding") for tag in queue_content().values())
    assert read_columns(batch, "rm_scores")
    tq.kv_clear(keys=list(batch.keys), partition_id=PARTITION)
