"""What a job installs in its workers: whole jobs beside one process that never sees a pad.

Each optimizer step of two FSDP2 ranks is held against verl's own loss on the same rows, one by one,
with a denominator that is worked out by hand, from the weights that one process has reached so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import pytest
import torch

from tests.support.estimator_formulas import Sample, advantages, returns
from tests.support.fsdp2_workers import make_value_model
from tests.support.jobs import ACTOR, CRITIC, PROBE, run_job
from tests.support.one_process import OneProcess
from tests.support.probe import TRAINED
from tests.support.tolerance import ADAM_EPS, LOG_PROB_AGREEMENT, RELATIVE_METRIC
from tests.support.verl_config import compose_job
from verl_padding.on_cpu.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS, MINI, CRITIC_MINI, RANKS, STEPS = 6, 2, 3, 2, 2
LR = 1e-3
ACTOR_SETTINGS = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.3",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    f"actor_rollout_ref.actor.optim.lr={LR}",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    f"+actor_rollout_ref.actor.optim.{ADAM_EPS}",
)
GAMMA, LAM = 0.9, 0.8
CRITIC_SETTINGS = (
    "algorithm.adv_estimator=gae",
    f"algorithm.gamma={GAMMA}",
    f"algorithm.lam={LAM}",
    f"critic.ppo_mini_batch_size={CRITIC_MINI}",
    f"critic.optim.lr={LR}",
    "critic.optim.lr_scheduler_type=cosine",
    f"+critic.optim.{ADAM_EPS}",
)
METRICS = {
    ACTOR: ("loss", "grad_norm", "actor/pg_loss", "kl_loss", "actor/entropy_loss", "actor/ppo_kl"),
    CRITIC: ("loss", "grad_norm", "critic/vf_loss", "critic/vpred_mean"),
}


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """An optimizer step, as the workers had it."""

    rows: list[dict[str, Any]]  # real ones, of all ranks
    n_rows_D: list[int]  # of each rank, pads among them
    metrics: Mapping[str, float]


def mini_batches(facts, model):
    files_D = [sorted((facts.folder / PROBE).glob(f"{model}_{rank}_*.pt")) for rank in range(RANKS)]
    of_ranks = [[torch.load(path, weights_only=False) for path in files] for files in files_D]
    return [
        MiniBatch(
            rows=[row for rank in ranks for row in rank["rows"] if row["loss_mask"].any()],
            n_rows_D=[len(rank["rows"]) for rank in ranks],
            metrics=ranks[0]["metrics"],
        )
        for ranks in zip(*of_ranks, strict=True)
    ]


def run(folder, *overrides, steps=STEPS, model_kind="qwen2"):
    probed = {TRAINED: "1"}
    return run_job(
        folder, *ACTOR_SETTINGS, *overrides, steps=steps, probed=probed, model_kind=model_kind
    )


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    """GAE of whole sessions with a critic and a reference; three mini-batches of the actor, two of
    the critic."""
    folder = tmp_path_factory.mktemp("prompt")
    critic = make_value_model(make_tiny_model("qwen2", folder / "models"), folder / "critic")
    return run(
        folder,
        "+padding=prompt",
        "padding.advantages=session",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.agent.default_agent_loop=snapshots",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        *CRITIC_SETTINGS,
        f"critic.model.path={critic}",
    )


def by_training_step(facts, model, counts):
    """The mini-batches of each training step, whose numbers are ``counts``."""
    found = mini_batches(facts, model)
    assert len(found) == sum(counts)
    return [[found.pop(0) for _ in range(count)] for count in counts]


def assert_trained_as_by_one_process(plain, steps, model):
    for taken in steps:
        for number, mini_batch in enumerate(taken):
            want = plain.optimizer_step(mini_batch.rows, n_rows=len(mini_batch.rows))
            for name in METRICS[model]:
                agrees = pytest.approx(want[name], rel=RELATIVE_METRIC, abs=5e-7)
                assert mini_batch.metrics[name] == agrees, name
            last = number == len(taken) - 1
            assert ("lr" in mini_batch.metrics) == last, "the schedule moves once a training step"
        plain.schedule.step()


def rows_of(taken):
    """The tokens of each real row."""
    return sorted(
        tuple(row["input_ids"].tolist()) for mini_batch in taken for row in mini_batch.rows
    )


def actor_of(facts, model_kind, steps=STEPS):
    config = compose_job(
        "+local=cpu", *ACTOR_SETTINGS, "actor_rollout_ref.actor.use_dynamic_bsz=true"
    )
    model = make_tiny_model(model_kind, facts.folder / "models")
    return OneProcess(config.actor_rollout_ref.actor, model, steps=steps)


def test_a_prompt_job_trains_actor_and_critic_as_one_process(prompt):
    actor = actor_of(prompt, "qwen2")
    model = prompt.folder / "critic"
    config = compose_job(
        "+local=cpu", *ACTOR_SETTINGS, *CRITIC_SETTINGS, f"critic.model.path={model}"
    )
    critic = OneProcess(config.critic, model, steps=STEPS)
    actor_steps = by_training_step(prompt, ACTOR, [PROMPTS // MINI] * STEPS)
    critic_steps = by_training_step(prompt, CRITIC, [PROMPTS // CRITIC_MINI] * STEPS)
    assert len({len(each.rows) for taken in actor_steps for each in taken}) > 2, (
        "sizes were meant to differ"
    )

    # Before any update, old policy, reference and values are those of the first weights.
    rows = [row for each in actor_steps[0] for row in each.rows]
    for name in ("old_log_probs", "ref_log_prob"):
        for row, want in zip(rows, actor.response_outputs(rows, "log_probs"), strict=True):
            torch.testing.assert_close(row[name], want, rtol=0, atol=LOG_PROB_AGREEMENT)
    for row, want in zip(rows, critic.response_outputs(rows, "values"), strict=True):
        torch.testing.assert_close(row["values"], want, rtol=0, atol=LOG_PROB_AGREEMENT)

    assert_trained_as_by_one_process(actor, actor_steps, ACTOR)
    assert_trained_as_by_one_process(critic, critic_steps, CRITIC)


def trajectory_places(rows):
    """Of each row of a session, in order: the place of each response token in what the session has
    said. A row goes on from the longest earlier one that it begins with."""
    said = [row["responses"].tolist() for row in rows]
    places = []
    n_tokens = 0
    for number, row in enumerate(said):
        earlier = [each for each in range(number) if row[: len(said[each])] == said[each] != row]
        goes_on = max((places[each] for each in earlier), key=len, default=[])
        new = range(n_tokens, n_tokens + len(row) - len(goes_on))
        places.append([*goes_on, *new])
        n_tokens += len(new)
    return places


def test_advantages_are_those_of_the_actions_of_whole_sessions(prompt):
    for step in range(1, STEPS + 1):
        rows = torch.load(prompt.folder / PROBE / f"batch_{step}.pt", weights_only=False)
        trained, actions, samples = [], [], []  # tokens of rows; of each session, once
        for number, (_, keys) in enumerate(groupby(rows, key=lambda key: key.rpartition("_")[0])):
            session, value_of = [rows[key] for key in keys], {}
            for row, places in zip(session, trajectory_places(session), strict=True):
                for token, place in enumerate(places):
                    if row["response_mask"][token]:
                        trained.append((row, token, (number, place)))
                        value_of.setdefault(place, float(row["values"][token]))
            actions += [(number, place) for place in sorted(value_of)]
            values = [value_of[place] for place in sorted(value_of)]
            reward = float(session[-1]["rm_scores"].sum())
            samples.append(Sample(f"{number}", reward, values, [0.0] * len(values)))
        assert len(trained) > len(actions), "actions were meant to stand in several rows"
        for name, formula, tolerance in (
            ("returns", returns, {"rel": 1e-5, "abs": 1e-6}),
            ("advantages", advantages, {"rel": 1e-4, "abs": 1e-5}),
        ):
            of_samples = chain.from_iterable(formula("gae", samples, GAMMA, LAM))
            want = dict(zip(actions, of_samples, strict=True))
            for row, token, action in trained:
                assert float(row[name][token]) == pytest.approx(want[action], **tolerance)


def test_a_prompt_job_gives_both_ranks_all_rows_and_no_more_pads(prompt):
    for model, call, prompts in ((ACTOR, "actor", MINI), (CRITIC, "critic", CRITIC_MINI)):
        steps = by_training_step(prompt, model, [PROMPTS // prompts] * STEPS)
        for step, taken in enumerate(steps, start=1):
            assert sum(len(each.rows) for each in taken) == prompt.rows[step].real
            assert all(each.n_rows_D[0] == each.n_rows_D[1] for each in taken)
            pads = sum(sum(each.n_rows_D) - len(each.rows) for each in taken)
            assert pads == prompt.metrics[step][f"padding/{call}/pad_rows/total"]
        assert rows_of(steps[0]) != rows_of(steps[1])
