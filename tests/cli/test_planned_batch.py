"""Plans of recorded steps and jobs, and their page."""

import json
from pathlib import Path

from tests.cli.test_plan import (
    PLAN_PACKER,
    SHARED,
    SHARING,
    plan_of,
    refused,
    run,
    write_lines,
)
from tests.record.test_step_file import made_step
from tests.support.written_pages import parsed
from verl_padding.record.step_file import write_steps

ROWS = [{"prompt": f"p{row // 4}", "session": row % 4, "tokens": 10 + row} for row in range(64)]


def test_a_recorded_step_is_planned_with_what_its_rows_share(tmp_path):
    step, path = made_step(), tmp_path / "3.jsonl"
    write_steps([step], path)
    plan = plan_of(path, *SHARING, *SHARED)
    (rank,) = plan["steps"][0]["ranks"]
    assert sorted(row for micro_batch in rank["micro_batches"] for row in micro_batch["rows"]) == [
        0,
        1,
        2,
        3,
    ]
    # 12, 20, 15 and 20 tokens: row 0 is the beginning of row 1, and row 2 has 7 tokens of it, the
    # last computed again.
    assert plan["figures"]["computed_tokens"] == 20 + (15 - 6) + 20
    assert "1 of 4 rows, 29.9% of the tokens" in plan["notes"][0]
    write_steps([step, made_step(update=1)], path)
    both = [*map(json.loads, run(path, "--json", *SHARING, *SHARED).stdout.splitlines())]
    assert [Path(each["file"]).name for each in both] == ["3.jsonl, update 0", "3.jsonl, update 1"]
    assert [each["steps"] for each in both] == [plan["steps"]] * 2
    write_steps([made_step(rows=[])], path)
    assert "Record steps with padding.record=true." in refused(path, *SHARING, *SHARED)


def test_ranks_sizes_budget_and_settings_are_those_of_the_job(job, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    budgets = (
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    )
    of_job = (*job, *budgets, "trainer.n_gpus_per_node=2", "+padding=prompt", "padding.packer=plan")
    by_job = plan_of(file, "--", *of_job)
    sizes = ("--dp", 2, "--mini-batch", 2, "--n", 4, "--budget", 100)
    by_options = plan_of(file, *sizes, *PLAN_PACKER)
    assert by_job["steps"] == by_options["steps"]
    assert (by_job["strategy"], by_job["packer"]) == ("prompt", "plan")
    page = tmp_path / "plan.html"
    assert run(file, "--page", page, "--", *of_job).exit_code == 0
    assert {"actor", "log_prob"} <= parsed(page).packed["step-1"]["charts"].keys()


def test_a_job_that_cannot_be_planned_for_is_refused_in_a_line(job, path):
    for arguments, cause in (
        (job, "Add +padding=fast"),
        ([*job, "+padding=prompt", "nonsense=1"], "nonsense=1"),
        ([*job, "+padding=prompt", "padding.strategy=x"], "padding.strategy='x'"),
    ):
        assert cause in refused(path, "--", *arguments)
