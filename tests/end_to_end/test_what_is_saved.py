"""What a job of ``+padding=fast`` says that it has saved, beside what reached its model: each pass
of which is counted in the workers, by its input ids."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.estimator_formulas import Sample, advantages
from tests.support.jobs import ACTOR, PROBE, JobFacts, run_job
from tests.support.one_process import OneProcess
from tests.support.probe import TRAINED
from tests.support.tolerance import ADAM_EPS, RELATIVE_METRIC
from tests.support.verl_config import compose_job
from verl_padding.job import metric_names
from verl_padding.record.step_file import FOLDER, RecordedStep, read_steps

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

RANKS, PROMPTS, SESSIONS, BUDGET = 2, 6, 3, 48
OPTIMIZER = (f"+actor_rollout_ref.actor.optim.{ADAM_EPS}",)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The only step of the job."""

    facts: JobFacts
    rows: dict[str, dict[str, Any]]  # by key, as the step left them
    recorded: RecordedStep
    reached_DK: list[list[int]]  # input ids of each pass of a rank's model in the actor's update
    pads: int  # tokens of pads among them
    metrics: dict[str, float]

    @property
    def reached(self):
        """Input ids of real rows."""
        return sum(map(sum, self.reached_DK)) - self.pads

    def tokens(self, *, computed):
        """Of the rows that the update has computed, or left out."""
        return sum(row.tokens for row in self.recorded.rows if bool(row.places) == computed)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Two of three prompts are answered equally well by all sessions, whose rows begin alike."""
    folder = tmp_path_factory.mktemp("fast")
    facts = run_job(
        folder,
        "+padding=fast",
        "padding.optimizer_steps=configured",
        "padding.record=true",
        "padding.repeated_tokens=once",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.agent.default_agent_loop=snapshots_of_equal_prompts",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={BUDGET}",
        *OPTIMIZER,
        steps=1,
        probed={TRAINED: "1"},
    )
    (recorded,) = read_steps(folder / FOLDER / "1.jsonl")
    sent = [
        row
        for path in sorted((folder / PROBE).glob(f"{ACTOR}_*.pt"))
        for row in torch.load(path, weights_only=False)["rows"]
    ]
    updates = {note["rank"]: note["tokens"] for note in facts.calls}
    return Step(
        facts=facts,
        rows=torch.load(folder / PROBE / "batch_1.pt", weights_only=False),
        recorded=recorded,
        reached_DK=[updates[rank] for rank in range(RANKS)],
        pads=sum(len(row["input_ids"]) for row in sent if not row["loss_mask"].any()),
        metrics=facts.metrics[1],
    )


def to_compute(rows):
    """Tokens of rows, each once for all rows that begin with the same up to the one after it, of
    which the model's output there tells; a row that another begins with has none of its own."""
    beginnings = {row[:end] for row in rows for end in range(2, len(row) + 1)}
    leaves = {row for row in rows if not any(row == each[:-1] for each in beginnings)}
    return len(beginnings) + len(leaves)


def test_workers_make_the_update_alone(step):
    calls = Counter((note["call"], note["rank"]) for note in step.facts.calls)
    assert calls == {("update_actor", rank): 1 for rank in range(RANKS)}
    assert [taken.moved for taken in step.facts.optimizer_steps[ACTOR]] == [True]


def test_what_rows_begin_with_reaches_the_model_once_a_micro_batch(step):
    ids = {key: tuple(row["input_ids"].tolist()) for key, row in step.rows.items()}
    rows_DK = [[[] for _ in passes] for passes in step.reached_DK]
    for row in step.recorded.rows:
        for place in row.places.values():
            assert place.micro_batch is not None
            rows_DK[place.rank][place.micro_batch].append(ids[row.key])
    assert sum(to_compute(rows) for of_rank in rows_DK for rows in of_rank) == step.reached
    for of_rank, passes in zip(rows_DK, step.reached_DK, strict=True):
        assert len(passes) > 1, "more micro-batches than one were meant"
        for rows, reached in zip(of_rank, passes, strict=True):
            assert to_compute(rows) <= reached <= to_compute(rows) + step.pads
    assert step.reached < 0.8 * step.tokens(computed=True), "rows were meant to share"


def test_rows_without_an_advantage_and_no_others_are_dropped(step):
    want = group_advantages(step.rows)
    for row in step.recorded.rows:
        mask = step.rows[row.key]["response_mask"].bool()
        trains = bool(mask.any()) and want[row.key] != 0
        assert (bool(row.places), row.zero_advantage) == (trains, not trains), row.key
        got = step.rows[row.key]["advantages"][mask]
        assert got.tolist() == pytest.approx([want[row.key]] * len(got), abs=1e-6)
    dropped = sum(not row.places for row in step.recorded.rows)
    assert step.metrics["padding/actor/left_out_rows/total"] == dropped > 0
    assert step.metrics["padding/real_rows/total"] == len(step.recorded.rows)


def group_advantages(rows):
    """GRPO's, of each row: how much better its session was than those of its prompt."""
    reward_of = {key.rpartition("_")[0]: float(row["rm_scores"].sum()) for key, row in rows.items()}
    assert len(reward_of) == PROMPTS * SESSIONS
    samples = [
        Sample(session.rpartition("_")[0], reward, [0.0], [0.0])
        for session, reward in reward_of.items()
    ]
    found = dict(zip(reward_of, advantages("grpo", samples, 1, 1), strict=True))
    return {key: found[key.rpartition("_")[0]][0] for key in rows}


def test_each_sampled_token_is_trained_in_one_row_of_its_session(step):
    (sampled,) = (note["masks"] for note in step.facts.sampled if note["partition"] == "train")
    before, after = ({}, {})
    for key, row in step.rows.items():
        session, ids = key.rpartition("_")[0], row["input_ids"].tolist()
        start = len(ids) - len(row["responses"])
        for found, mask in ((before, sampled[key]), (after, row["response_mask"].tolist())):
            for place, trains in enumerate(mask, start + 1):
                sample = (session, *ids[:place])
                found[sample] = found.get(sample, 0) + int(trains)
    assert max(before.values()) > 1, "rows were meant to repeat tokens"
    assert after == {sample: min(times, 1) for sample, times in before.items()}
    repeated = sum(before.values()) - sum(after.values())
    assert step.metrics["padding/repeated_tokens/total"] == repeated


def test_metrics_and_the_last_line_say_what_did_not_reach_the_model(step):
    all_tokens = sum(len(row["input_ids"]) for row in step.rows.values())
    saved = {
        "shared": step.tokens(computed=True) - step.reached,
        "skipped rows": step.tokens(computed=False),
        "skipped pass": all_tokens,
    }
    assert step.metrics[metric_names.ALL_COMPUTED_TOKENS] == step.reached
    assert [step.metrics[name] for name in metric_names.SAVED_TOKENS] == list(saved.values())
    assert step.metrics[metric_names.SAVED_PASSES] == 1
    # Without savings, all rows are in the pass and in the update.
    total = sum(saved.values())
    assert total + step.reached == 2 * all_tokens
    (line,) = re.findall(r"verl_padding: saved .*", step.facts.log)
    told = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)]
    dropped = sum(not row.places for row in step.recorded.rows)
    shared, skipped, passes = saved.values()
    percent = round(100 * total / (2 * all_tokens))
    assert told == [total, 2 * all_tokens, percent, shared, skipped, dropped, passes, 1]


def test_micro_batches_are_as_full_as_their_passes_were(step):
    passes = [len(of_rank) for of_rank in step.reached_DK]
    assert [step.metrics["padding/actor/micro_batches"]] * RANKS == passes
    full = step.reached / (sum(passes) * BUDGET)
    assert step.metrics["padding/actor/packing_efficiency"] == pytest.approx(full)
    assert max(map(max, step.reached_DK)) <= BUDGET


def test_the_gradient_is_that_of_one_process_with_all_rows(step):
    config = compose_job(
        "+local=cpu",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        *OPTIMIZER,
    )
    (model,) = (step.facts.folder / "models").iterdir()
    actor = OneProcess(config.actor_rollout_ref.actor, model, steps=1)
    rows = list(step.rows.values())
    for row, old in zip(rows, actor.response_outputs(rows, "log_probs"), strict=True):
        row["old_log_probs"] = old
    want = actor.optimizer_step(rows, n_rows=len(rows))
    assert want["grad_norm"] > 0
    for name in ("actor/grad_norm", "actor/pg_loss"):
        expected = want[name.removeprefix("actor/") if "grad" in name else name]
        assert step.metrics[name] == pytest.approx(expected, rel=RELATIVE_METRIC, abs=5e-7), name
