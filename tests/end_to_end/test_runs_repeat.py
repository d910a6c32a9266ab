"""The same job, run again: the same rollouts and metrics, although no session ends when it ended before."""

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.jobs import JobFacts, run_job
from verl_padding.pads.prompt_order import place_of
from verl_padding.plan.row_keys import parts_of_key
from verl_padding.runs.report import ROLLOUTS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, PROMPTS, SESSIONS = 3, 6, 3
MEASURED = re.compile(r"timing|seconds|memory|perf/(mfu|throughput|time)")
"""Metrics of time and memory; all others repeat."""


def run(folder: Path) -> JobFacts:
    """GRPO on sub-agents who are asked the same at once; data set and mini-batches are shuffled; with validation."""
    return run_job(
        folder,
        "+padding=prompt",
        "actor_rollout_ref.rollout.agent.default_agent_loop=subagents_in_any_order",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",  # a server a rank
        "data.shuffle=true",
        "actor_rollout_ref.actor.shuffle=true",
        "trainer.test_freq=3",
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFacts, JobFacts]:
    return run(tmp_path_factory.mktemp("first")), run(tmp_path_factory.mktemp("again"))


def row_name(key: str) -> tuple:
    """Step and place of the prompt, session, row: what of a row's key repeats. A prompt of validation has no place."""
    uid, session, index = parts_of_key(key)
    return place_of(uid), int(session), int(index)


def rollouts(facts: JobFacts) -> dict[int, list[tuple]]:
    """Step -> rows of the dump, which verl sorts by uid."""
    lines = {int(path.stem): path.read_text().split("\n")[:-1] for path in (facts.folder / ROLLOUTS).glob("*.jsonl")}
    return {
        step: [(row_name(row["uid"]), row["input"], row["output"], row["score"]) for row in map(json.loads, rows)]
        for step, rows in lines.items()
    }


def repeating_metrics(facts: JobFacts) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in metrics.items() if not MEASURED.search(name)}
        for step, metrics in facts.metrics.items()
    }


def test_each_row_of_each_step_is_generated_again_letter_by_letter(both) -> None:
    rows, again = map(rollouts, both)
    assert sorted(rows) == [1, 2, 3]
    for step in rows:
        assert len(rows[step]) > PROMPTS * SESSIONS
        assert len({name for name, *_ in rows[step]}) == len(rows[step])
        assert {name[0] for name, *_ in rows[step]} == {(step, place) for place in range(PROMPTS)}
    assert len({output for step in rows for _, _, output, _ in rows[step]}) > 50, "responses that differ"
    assert again == rows


def test_each_metric_of_each_step_is_the_same_to_the_last_bit(both) -> None:
    metrics, again = map(repeating_metrics, both)
    assert sorted(metrics) == [1, 2, 3]
    assert all(len(values) > 60 for values in metrics.values())
    assert any(name.startswith("val-") for name in metrics[3])
    assert any(name.startswith("rollout_corr/") for name in metrics[1])
    for step, values in again.items():
        for name, value in values.items():
            # verl adds up what validation has earned in the order in which its sessions ended.
            same = pytest.approx(metrics[step][name], rel=1e-12) if name.startswith("val-") else metrics[step][name]
            assert value == same, (step, name)
        assert values.keys() == metrics[step].keys()


def names_of(batches: list[dict]) -> list[list[tuple]]:
    return [[row_name(key) for key in batch["keys"]] for batch in batches]


def test_the_trainer_gets_the_rows_in_the_order_of_the_data_set_whichever_session_ended_first(both) -> None:
    trained, again = (names_of(facts.batches) for facts in both)
    assert len(trained) == STEPS
    assert trained == again == [sorted(names) for names in trained]
    came = [names_of([each for each in facts.sampled if each["partition"] == "train"]) for facts in both]
    for of_first, of_again, want in zip(*came, trained, strict=True):
        assert sorted(of_first) == sorted(of_again) == want
        assert of_first != of_again, "they ended in the same order: nothing was asked of the trainer"
