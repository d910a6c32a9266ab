"""Advantages and rollout corrections, by verl's own methods: pads in the queue change nothing.

verl's ``_compute_advantage`` runs twice on the same rows, before a pad is made and while pads wait
in TransferQueue: advantages, returns, rewards, the controller of the in-reward KL and the metrics
must be the same to the last bit.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transfer_queue as tq
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls

from tests.equivalence.test_registered_losses import presets
from tests.support.rows_in_queue import (
    PARTITION,
    put_columns,
    put_rows,
    queue_content,
    read_columns,
)
from tests.support.trainer_without_workers import padded_trainer
from tests.support.verl_config import compose_job
from verl_padding.driver.advantages import check_advantages_stay_with_rows
from verl_padding.errors import PaddingConfigError
from verl_padding.pads.upsampling import strip
from verl_padding.plan.row_keys import session_of_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

CRITIC = {"gae": ["critic.ppo_mini_batch_size=2"]}
LENGTHS = [(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (8, 4), (2, 5)]
KEYS = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_1_0", "b_1_1", "c_0_0", "c_1_0"]
COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
RESULTS = ("advantages", "returns", "token_level_rewards", "response_mask", "rollout_is_weights")


@dataclass(frozen=True)
class Outcome:
    """What verl's method left behind."""

    rows: dict[str, dict[str, list[float]]]  # fields of the queue, by key
    kl_coefficient: float  # of the adaptive controller
    metrics: dict[str, Any]
    error: tuple[type, str] | None  # what it ended with, if it raised


def put_scored_rows():
    """Rows as the trainer has them before advantages: each ends with the reward of its session."""
    draw = torch.Generator().manual_seed(0)
    reward = {
        session: float(torch.randn((), generator=draw))
        for session in dict.fromkeys(map(session_of_key, KEYS))
    }
    batch = put_rows(LENGTHS, KEYS)
    rows = [(n, session_of_key(key)) for (_, n), key in zip(LENGTHS, KEYS, strict=True)]
    scores = [torch.tensor([0.0] * (n - 1) + [reward[session]]) for n, session in rows]
    columns = {name: [torch.randn(n, generator=draw) for n, _ in rows] for name in COLUMNS}
    return put_columns(batch, rm_scores=scores, **columns)


def without_and_with_pads(estimator, *overrides, kl_in_reward=True):
    """What verl's method does with the same rows, before a pad is made and while pads wait in the
    queue."""
    settings = (
        f"algorithm.adv_estimator={estimator}",
        f"algorithm.use_kl_in_reward={kl_in_reward}",
    )
    trainer = padded_trainer(*settings, *CRITIC.get(estimator, []), *overrides)
    without = computed(trainer, put_scored_rows())
    batch = trainer._balance_batch(put_scored_rows(), {})
    assert trainer.steps.current.plan.n_pads > 0
    assert len(queue_content()) > len(LENGTHS)
    with_pads = computed(trainer, batch)
    strip(trainer.steps.current.pads)
    return without, with_pads


def computed(trainer, batch):
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10)
    metrics = {}
    error = None
    torch.manual_seed(0)
    try:
        assert trainer._compute_advantage(batch, metrics).keys == batch.keys
    except Exception as raised:  # whatever verl raises, the same must come with pads
        error = type(raised), str(raised)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION)
    found = {name: data[name].unbind() for name in RESULTS if name in data}
    rows = {
        key: {name: values[row].tolist() for name, values in found.items()}
        for row, key in enumerate(batch.keys)
    }
    return Outcome(rows, trainer.kl_ctrl_in_reward.value, metrics, error)


PF_PPO = ("pow", "max_min", "max_random")

VERLS_LIMITS = {
    "gdpo": "needs fields that the v1 trainer does not select",
    "optimal_token_baseline": "needs fields that the v1 trainer does not select",
    "remax": "needs reward_baselines, which the v1 trainer does not make",
    "tir_optimal_token_baseline": "needs fields that the v1 trainer does not select",
}
"""Estimators that fail in verl 0.9.1's v1 trainer without any pad."""


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_an_estimator_gives_with_pads_in_the_queue_what_it_gives_without(name):
    without, with_pads = without_and_with_pads(name)
    assert with_pads == without
    assert (without.error is not None) == (name in VERLS_LIMITS), without.error
    assert without.kl_coefficient != 0.2, "the controller was meant to move"
    assert without.metrics
    if without.error is None:
        assert any(any(row["advantages"]) for row in without.rows.values())


def verls_advantages(estimator, **switches):
    """What verl's own method puts under the keys of the rows; its generator is seeded, so draws
    repeat."""
    trainer = padded_trainer(f"algorithm.adv_estimator={estimator}", *CRITIC.get(estimator, []))
    trainer.config.algorithm.update(switches)
    batch = put_scored_rows()
    torch.manual_seed(0)
    PPOTrainer._compute_advantage(trainer, batch, {})
    (advantages,) = read_columns(batch, "advantages")
    return [row.tolist() for row in advantages]


@pytest.mark.parametrize(
    ("estimator", "method"),
    [
        *[("gae", method) for method in PF_PPO],
        *[
            (name, PF_PPO[0])
            for name in sorted(set(ADV_ESTIMATOR_REGISTRY) - {"gae", *VERLS_LIMITS})
        ],
    ],
)
def test_an_algorithm_that_mixes_up_the_advantages_of_rows_is_refused(estimator, method):
    """pf_ppo draws among advantages that are there: unless a row got its own, it got another row's.

    Once verl keeps them together, check_advantages_stay_with_rows can go.
    """
    switches = {"use_pf_ppo": True, "pf_ppo": {"reweight_method": method, "weight_pow": 2.0}}
    keeps = verls_advantages(estimator, **switches) == verls_advantages(estimator)
    assert keeps == (estimator != "gae")
    config = compose_job("+padding=prompt", f"algorithm.adv_estimator={estimator}")
    check_advantages_stay_with_rows(config)
    config.algorithm.update(switches)
    if keeps:
        check_advantages_stay_with_rows(config)
    else:
        with pytest.raises(PaddingConfigError, match=r"^algorithm.use_pf_ppo=True: "):
            check_advantages_stay_with_rows(config)


def test_a_session_whose_last_row_is_not_trained_has_verls_reward():
    """That of its last row: the group's mean stays in the middle of its advantages."""
    keys, masks = ["p_0_0", "p_0_1", "p_1_0"], [[1, 1], [0, 0], [1]]
    lengths = [(2, len(mask)) for mask in masks]
    scores = [[0.0, 0.6], [0.0, 1.0], [0.7]]
    trainer, found = padded_trainer("algorithm.adv_estimator=grpo"), {}
    for kind in (get_trainer_cls("sync"), type(trainer)):
        batch = put_rows(
            lengths,
            keys,
            rm_scores=list(map(torch.tensor, scores)),
            old_log_probs=[torch.zeros(len(mask)) for mask in masks],
            response_mask=list(map(torch.tensor, masks)),
        )
        kind._compute_advantage(trainer, batch, {})
        advantages, returns = read_columns(batch, "advantages", "returns")
        assert all(map(torch.equal, advantages, returns))
        found[kind] = [row.tolist() for row in advantages]
    verls, ours = found.values()
    assert verls[0] == [0, 0], "verl looks for a trained token now: compute_grpo_advantages may go"
    half = 0.5**0.5  # (x - mean) / std of two, with Bessel's correction
    assert ours[0] == pytest.approx([half] * 2, abs=1e-4)
    assert ours[2] == pytest.approx([-half], abs=1e-4)


FIELDS = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
FIELDS += ("rollout_is_batch_normalize",)
CORRECTIONS = presets("decoupled_")
CORRECTIONS["normalized"] = RolloutCorrectionConfig(rollout_is_batch_normalize=True)
for option, bounds in {"token_k1": "0.5_1.5", "seq_max_k2": "0.5"}.items():
    CORRECTIONS[f"rejects by {option}"] = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs=option, rollout_rs_threshold=bounds
    )


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_decoupled_correction_computes_from_real_rows(name):
    section, said = "algorithm.rollout_correction", vars(CORRECTIONS[name])
    settings = [f"{section}.{field}={said[field]}" for field in FIELDS]
    without, with_pads = without_and_with_pads(
        "grpo", *(setting.replace("=None", "=null") for setting in settings)
    )
    assert with_pads == without
    assert without.error is None
    assert len([each for each in without.metrics if each.startswith("rollout_corr/")]) > 5
    keeps_all = all(all(row["response_mask"]) for row in without.rows.values())
    assert not keeps_all or not name.startswith("rejects"), "nothing was rejected"
