"""Where ``verl-padding plan`` reads batches from, its notes on them, and its JSON."""

import json
import os
from pathlib import Path
from threading import Thread

import pytest

from tests.cli.test_plan_command import CHAINS, SHARED, compared, plan_of, refused, run, write_lines
from tests.record.test_step_file import made_step
from verl_padding.config import PaddingConfig
from verl_padding.record.step_file import write_steps

ROWS = [{"prompt": f"p{row // 4}", "session": row % 4, "tokens": 10 + row} for row in range(64)]
SHAPE = ("--dp", 2, "--mini-batch", 4, "--n", 4, "--budget", 100)


@pytest.fixture
def file(tmp_path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three steps of 64, 32 and 60 rows."""
    place = tmp_path / "rollouts"
    place.mkdir()
    for step, rows in ((2, ROWS[:32]), (10, ROWS[:60]), (1, ROWS)):
        write_lines(place / f"{step}.jsonl", rows)
    return place


def test_standard_input_is_planned_as_a_file_is(file):
    from_file = plan_of(file, *SHAPE)
    given = json.loads(run("-", *SHAPE, "--json", given=file.read_text()).stdout)
    assert given["file"] == "standard input"
    assert given["steps"] == from_file["steps"]
    assert run("-", *SHAPE, given=file.read_text()).stdout.startswith("standard input: 2 ranks, strategy prompt")
    assert "standard input, line 1 (row number 0): not a row" in run("-", *SHAPE, given="{").stderr


def test_a_pipe_with_a_name_is_read_once(file, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=[file.read_bytes()])
    writer.start()
    shown = plan_of(pipe, *SHAPE)
    writer.join()
    assert shown["steps"] == plan_of(file, *SHAPE)["steps"]


def test_each_dump_of_a_folder_is_a_batch_of_its_own_and_has_a_line_in_the_order_of_steps(folder):
    result = run(folder, *SHAPE)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.split("\n") if "│" in line]
    assert [line[:3] for line in lines] == [
        ["1.jsonl", "4", "64"],
        ["2.jsonl", "2", "32"],
        ["10.jsonl", "4", "60"],
        ["all", "10", "156"],
    ]
    assert "--mini-batch 4: does not divide 15 prompts with rows." in result.stderr
    assert result.stderr.endswith("(1 of 3 files)\n")
    shown = plan_of(folder, *SHAPE, "--budget", 128, "--compare")
    assert [Path(batch["file"]).name for batch in shown["batches"]] == ["1.jsonl", "2.jsonl", "10.jsonl"]
    alone = plan_of(folder / "2.jsonl", *SHAPE, "--budget", 128, "--compare")
    for key in ("steps", "comparison", "notes"):
        assert shown["batches"][1][key] == alone[key]
    rows = [batch["comparison"]["verl"]["rows"] for batch in shown["batches"]]
    assert rows == [64, 32, 60]
    assert shown["comparison"]["verl"]["rows"] == shown["comparison"]["plan"]["rows"] == sum(rows)


def test_of_a_folder_a_file_with_a_bad_line_is_left_out_and_no_picture_is_drawn(folder):
    assert "shows one batch" in refused(folder, *SHAPE, "--picture", "plan.png")
    (folder / "3.jsonl").write_text(json.dumps(ROWS[0]) + "\n{\n")
    result = run(folder, *SHAPE, "--json")
    assert "3.jsonl, line 2 (row number 1): not a row" in result.stderr
    shown = json.loads(result.stdout)
    assert [Path(batch["file"]).name for batch in shown["batches"]] == ["1.jsonl", "2.jsonl", "10.jsonl"]
    (left_out,) = shown["left_out"]
    assert left_out in result.stderr
    assert "3.jsonl, line 2" in refused(folder / "3.jsonl", *SHAPE)


def test_a_row_past_the_budget_is_refused_with_its_key_which_has_its_line(file):
    file.write_text("\n" + file.read_text())
    shown = refused(file, *SHAPE, "--budget", 72)
    assert f"{file}: row 'p15_3_64' has 73 tokens" in shown
    assert "raise --budget until it holds 73" in shown


def test_the_settings_have_the_defaults_of_the_job_and_stand_in_the_title(file):
    default = plan_of(file, *SHAPE)
    for setting in ("strategy", "packer", "sharing"):
        assert default[setting] == getattr(PaddingConfig(), setting)
    assert all(set(rank) == {"rows", "pads"} for step in default["steps"] for rank in step["ranks"])
    assert default["figures"]["micro_batches"] is None
    table = run(file, *SHAPE).stdout
    assert table.startswith("rows.jsonl: 2 ranks, strategy prompt, packer verl")
    assert "micro-" not in table.split("Planning")[0]
    planned = run(file, *SHAPE, "--packer", "plan").stdout
    assert planned.startswith("rows.jsonl: 2 ranks, strategy prompt, packer plan")
    assert "micro-" in planned


def test_a_file_may_have_any_name(file):
    strange = file.rename(file.with_name("[bold]rows[red].jsonl"))
    assert run(strange, *SHAPE).stdout.startswith("[bold]rows[red].jsonl: 2 ranks")
    assert f"{strange}: row 'p15_3_63'" in refused(strange, *SHAPE, "--budget", 9)


def test_what_sharing_saves_stands_beside_the_plan_without_it(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", CHAINS)
    shown = plan_of(path, *SHARED, "--budget", 256, "--compare")["comparison"]
    assert list(shown) == ["verl", "plan_without_sharing", "plan"]
    assert [column["computed_tokens"] for column in shown.values()] == [30, 30, 23]
    assert shown["plan"]["over_perfect"] < 1 <= shown["plan_without_sharing"]["over_perfect"]
    table = compared(run(path, *SHARED, "--budget", 256, "--compare").stdout)
    assert table["computed tokens"] == ["30", "30", "23"]


BRANCHING = [
    {"prompt": prompt, "session": session, "token_ids": [prompt_token, 7, 7, 7, 7, 7, 7, 8, *response]}
    for prompt, prompt_token in (("p0", 1), ("p1", 2))
    for session, response in enumerate(([3, 4, 5], [3, 4, 6], [9] * 4, [9] * 5))
]
"""Of each prompt two responses that part after two tokens, and two of which one is the beginning of the other."""


def test_trees_stand_beside_chains_and_no_sharing_by_ids_or_by_what_rows_share(tmp_path):
    shape = ("--dp", 1, "--n", 4, "--mini-batch", 2, "--budget", 256)
    settings = (*shape, "--packer", "plan", "--sharing", "trees", "--compare")
    shown = plan_of(write_lines(tmp_path / "ids.jsonl", BRANCHING), *settings)["comparison"]
    assert list(shown) == ["verl", "plan_without_sharing", "plan_with_chains", "plan"]
    # Of each prompt 13 tokens once, and a copy of the last one before [9..] and before 6 part.
    assert [column["computed_tokens"] for column in shown.values()] == [94, 94, 94, 2 * (8 + 3 + 2 + 6)]
    lengths = [
        {"prompt": row["prompt"], "session": row["session"], "tokens": len(row["token_ids"]), "shares": shares}
        for row, shares in zip(BRANCHING, [0, 10, 8, 12] * 2, strict=True)
    ]
    by_shares = plan_of(write_lines(tmp_path / "shares.jsonl", lengths), *settings)["comparison"]
    assert by_shares["plan"]["computed_tokens"] == shown["plan"]["computed_tokens"]


def notes(file: Path, *args: object) -> list[str]:
    result = run(file, *args, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)["notes"]
    assert result.stderr.split("\n")[:-1] == shown
    return shown


def test_options_that_the_rows_do_not_bear_out_are_shown_with_both_numbers(file):
    assert notes(file, *SHAPE) == notes(file, *SHAPE, "--budget", 128, "--compare") == []
    (shown,) = notes(file, *SHAPE, "--mini-batch", 5)
    assert shown.startswith("--mini-batch 5: does not divide 16 prompts with rows. The batch is planned as one of 20")
    for n in (2, 7):
        assert notes(file, *SHAPE, "--n", n) == [f"--n {n}: a prompt has up to 4 sessions."]
    assert notes(file, *SHAPE, "--dp", 32) == ["--dp 32: ranks have nothing but pads in 4 of 4 optimizer steps."]


def test_a_recorded_step_is_planned_with_what_its_rows_share_each_local_update_by_itself(tmp_path):
    step, shape = made_step(), ("--dp", 1, "--n", 2, "--mini-batch", 2, "--budget", 64, "--packer", "plan")
    write_steps([step], tmp_path / "3.jsonl")
    plan = plan_of(tmp_path / "3.jsonl", *shape, "--sharing", "trees")
    (rank,) = plan["steps"][0]["ranks"]
    assert sorted(row for micro_batch in rank["micro_batches"] for row in micro_batch["rows"]) == [0, 1, 2, 3]
    # 12, 20, 15 and 20 tokens: row 0 is the beginning of row 1, and row 2 has 7 tokens of it, the last computed again.
    assert plan["figures"]["computed_tokens"] == 20 + (15 - 6) + 20
    assert plan_of(tmp_path / "3.jsonl", *shape, "--sharing", "chains")["figures"]["computed_tokens"] == 20 + 15 + 20
    # Row 1 alone is idle.
    skipped = plan_of(tmp_path / "3.jsonl", *shape, "--idle-rows", "skip")
    (rank,) = skipped["steps"][0]["ranks"]
    assert sorted(row for micro_batch in rank["micro_batches"] for row in micro_batch["rows"]) == [0, 2, 3]
    piped = run("-", *shape, "--sharing", "trees", "--json", given=(tmp_path / "3.jsonl").read_text())
    assert json.loads(piped.stdout)["steps"] == plan["steps"]
    write_steps([step, made_step(update=1)], tmp_path / "3.jsonl")
    both = plan_of(tmp_path / "3.jsonl", *shape, "--sharing", "trees")
    assert [Path(batch["file"]).name for batch in both["batches"]] == ["3.jsonl, update 0", "3.jsonl, update 1"]
    assert [batch["steps"] for batch in both["batches"]] == [plan["steps"]] * 2
    write_steps([made_step(rows=[])], tmp_path / "3.jsonl")
    assert "3.jsonl: holds laps alone. Record steps with padding.record=true." in refused(tmp_path / "3.jsonl", *shape)


def test_of_a_folder_what_is_no_file_of_rows_is_named_and_left_out(folder):
    (folder / "7.jsonl").mkdir()
    (folder / "8.jsonl").write_text("[" * 100_000 + "\n")
    header = {"form": 1, "step": 9, "update": 0, "keys": ["a"]}
    (folder / "9.jsonl").write_text(json.dumps(header) + "\n")
    result = run(folder, *SHAPE)
    assert result.exit_code == 0
    assert all(f"{name}.jsonl" in result.stderr.replace("\n", "") for name in (7, 8, 9))
    for name in (8, 9):
        assert f"{name}.jsonl" in refused(folder / f"{name}.jsonl", *SHAPE)
