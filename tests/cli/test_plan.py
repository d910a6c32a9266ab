"""The command ``verl-padding plan``."""

import json
import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from tests.record.test_step_file import made_step
from tests.support.written_pages import parsed
from verl_padding.cli.app import app
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.plan import Sharing
from verl_padding.plan.cost import attention_cost
from verl_padding.record.step_file import write_steps

SHAPE = ("--dp", "4", "--mini-batch", "3", "--n", "2", "--budget", "1000")
PLANNED = (*SHAPE, "--packer", "plan")


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(n_prompts: int) -> list[dict]:
    """Rows of prompts with two sessions, of one to three rows each."""
    rng = np.random.default_rng(0)
    return [
        {"prompt": f"p{prompt}", "session": session, "tokens": int(rng.integers(10, 900))}
        for prompt in range(n_prompts)
        for session in range(2)
        for _ in range(int(rng.integers(1, 4)))
    ]


@pytest.fixture
def rows() -> list[dict]:
    return rows_of(9)


@pytest.fixture
def path(rows, tmp_path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", rows)


def run(*args: object, given: str | None = None):
    return CliRunner().invoke(app, ["plan", *map(str, args)], input=given)


def plan_of(*args: object) -> dict:
    result = run("--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().split("\n")) == 1
    return result.stderr


@pytest.mark.parametrize("strategy", ["prompt", "rows", "lcm"])
def test_the_json_is_the_whole_plan_and_keeps_its_promises(strategy, path, rows):
    extra = ("--n", "4") if strategy == "lcm" else ()  # 3 prompts x 4 rows: a multiple of 4 ranks
    plan = plan_of(path, *PLANNED, *extra, "--strategy", strategy)
    assert all(set(step) == {"ranks"} for step in plan["steps"])
    met, pads = Counter(), 0
    for step in plan["steps"]:
        sizes = set()
        assert len(step["ranks"]) == 4
        assert len({len(rank["micro_batches"]) for rank in step["ranks"]}) == 1
        for rank in step["ranks"]:
            sizes.add(sum(len(micro["rows"]) + micro["pads"] for micro in rank["micro_batches"]))
            for micro in rank["micro_batches"]:
                assert set(micro) == {"rows", "pads"}
                assert micro["rows"] or micro["pads"]
                assert sum(rows[row]["tokens"] for row in micro["rows"]) + 2 * micro["pads"] <= 1000
                met.update(micro["rows"])
                pads += micro["pads"]
        assert len(sizes) == 1
    assert met == Counter(range(len(rows)))
    assert pads == plan["figures"]["pads"] > 0
    assert plan["figures"]["micro_batches"] == sum(len(step["ranks"][0]["micro_batches"]) for step in plan["steps"])
    if strategy != "lcm":
        assert len(plan["steps"]) == 3
    if strategy == "prompt":
        prompts = [
            {rows[row]["prompt"] for rank in step["ranks"] for micro in rank["micro_batches"] for row in micro["rows"]}
            for step in plan["steps"]
        ]
        assert [len(step) for step in prompts] == [3, 3, 3]


def cost_of(tokens: int) -> int:
    return int(attention_cost(np.array([tokens]))[0])


def loads_of(step: dict, rows: list[dict]) -> list[list[int]]:
    """Cost of each micro-batch of each rank of a plan's step, pads of two tokens among it."""
    return [
        [sum(cost_of(rows[row]["tokens"]) for row in micro["rows"]) + micro["pads"] * cost_of(2) for micro in micros]
        for micros in (rank["micro_batches"] for rank in step["ranks"])
    ]


def test_the_table_shows_what_an_independent_count_finds(path, rows):
    plan = plan_of(path, *PLANNED)
    lines = [line.split("│")[1:-1] for line in run(path, *PLANNED).stdout.split("\n") if line.startswith("│")]
    table = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    slowest_of_all = cost_of_all = 0
    for number, step in enumerate(plan["steps"]):
        load = loads_of(step, rows)
        slowest, cost = sum(map(max, zip(*load, strict=True))), sum(map(sum, load))
        slowest_of_all, cost_of_all = slowest_of_all + slowest, cost_of_all + cost
        shown = table[str(number)]
        micros = [micro for rank in step["ranks"] for micro in rank["micro_batches"]]
        assert int(shown[0]) == sum(len(micro["rows"]) for micro in micros)
        assert int(shown[1]) == sum(micro["pads"] for micro in micros)
        tokens = sum(rows[row]["tokens"] for micro in micros for row in micro["rows"])
        assert int(shown[2].replace(",", "")) == tokens
        assert int(shown[3]) == len(load[0])
        assert shown[4] == f"{slowest * 4 / cost:.3f}"
        assert float(shown[5]) >= 1
    assert table["all"][4] == f"{slowest_of_all * 4 / cost_of_all:.3f}"
    assert int(table["all"][0]) == len(rows)


def test_verls_own_layout_stands_beside_the_plan(path, rows):
    shape = ("--dp", 2, "--mini-batch", 3, "--n", 2, "--budget", 1000, "--packer", "plan", "--compare")
    shown = compared(run(path, *shape).stdout)
    padded = -(-len(rows) // 6) * 6  # lcm(dp 2, 3 prompts x 2)
    assert shown["optimizer steps"] == [str(padded // 6), "3"]
    assert shown["pads"][0] == str(padded - len(rows))
    assert shown["rows"] == [str(len(rows))] * 2
    lengths = [row["tokens"] for row in rows] + [128] * (padded - len(rows))
    assert int(shown["tokens"][0].replace(",", "")) == sum(lengths[: len(rows)])
    assert shown["pad tokens"][0].replace(",", "") == str(128 * (padded - len(rows)))
    # The same by hand: ranks over the whole batch, their rows in order, 3 rows of each rank a step.
    cost = [24576 * length + length**2 for length in lengths]
    halves = get_seqlen_balanced_partitions(cost, k_partitions=2, equal_size=True)
    mini = micro = micro_batches = 0
    for start in range(0, padded // 2, 3):
        cells = [half[start : start + 3] for half in halves]
        loads = loads_of_common_count(cells, lengths, cost, budget=1000)
        mini += max(map(sum, loads))
        micro += sum(map(max, zip(*loads, strict=True)))
        micro_batches += len(loads[0])
    perfect = sum(cost[: len(rows)]) / 2
    assert shown["micro batches"][0] == str(micro_batches)
    assert shown["imbalance"][0] == f"{mini * 2 / sum(cost):.3f}"
    assert shown["micro imbalance"][0] == f"{micro * 2 / sum(cost):.3f}"
    assert shown["over perfect"][0] == f"{mini / perfect:.3f}"
    assert shown["micro over perfect"][0] == f"{micro / perfect:.3f}"
    verl, planned = map(float, shown["over perfect"])
    assert verl >= planned >= 1


def compared(output: str) -> dict[str, list[str]]:
    """The table of the comparison: its columns, by the headings of its lines."""
    lines = [line for line in output.split("verl and the plan")[1].split("\n") if line.startswith("│")]
    return {name: columns for name, *columns in ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines)}


def loads_of_common_count(cells: list[list[int]], lengths: list[int], cost: list[int], budget: int) -> list[list[int]]:
    """Cost of each micro-batch of each rank, at the first count that holds the budget on every rank."""
    for count in range(1, len(cells[0]) + 1):
        parts = [
            [
                [cell[place] for place in places]
                for places in get_seqlen_balanced_partitions([cost[row] for row in cell], count, equal_size=False)
            ]
            for cell in cells
        ]
        if all(sum(lengths[row] for row in part) <= budget for of_rank in parts for part in of_rank):
            # verl's order: by cost, every other one reversed to the front, so that the small ones are at both ends.
            for of_rank in parts:
                of_rank.sort(key=lambda part: (sum(cost[row] for row in part), part[0]), reverse=True)
            ordered = [of_rank[::2][::-1] + of_rank[1::2] for of_rank in parts]
            return [[sum(cost[row] for row in part) for part in of_rank] for of_rank in ordered]
    raise AssertionError("one row a micro-batch holds any budget")


def test_what_stock_verl_stops_at_is_refused_and_not_compared(path):
    assert "cannot share the 6 rows of a mini-batch" in refused(path, *SHAPE, "--compare")
    path.write_text('{"prompt": "a", "session": 0, "tokens": 5}\n')
    assert "a pad of stock verl has 128 tokens" in refused(path, *SHAPE, "--dp", 2, "--budget", 127, "--compare")
    assert run(path, *SHAPE, "--dp", 2, "--budget", 128, "--compare").exit_code == 0


def dump_line(uid: str, output: str) -> str:
    return json.dumps({"input": "ab", "output": output, "gts": None, "score": 1.0, "uid": uid}, ensure_ascii=False)


def test_a_rollout_dump_is_counted_by_a_tokenizer_and_stock_pads_are_left_out(tmp_path):
    path = tmp_path / "1.jsonl"
    # One token a byte; U+2028 would break the line for a reader that splits at it.
    texts = {"q_0_0": "xyz", "q_0_1": "a\u2028b", "pad77_0_0": "", "r_1_0": "z" * 40}
    path.write_text("".join(dump_line(uid, text) + "\n" for uid, text in texts.items()))
    model = make_tiny_model("qwen2", tmp_path)
    shape = ("--dp", "1", "--mini-batch", "2", "--n", "1", "--budget", "100")
    result = run(path, *shape, "--json", "--tokenizer", model)
    plan = json.loads(result.stdout)
    assert plan["notes"][0] in result.stderr
    assert "an estimate" in result.stderr
    assert "The plan leaves out 1 pad of stock verl that the rollout dump holds." in result.stderr
    assert sorted(plan["steps"][0]["ranks"][0]["rows"]) == [0, 1, 3]
    shown = run(path, *shape, "--tokenizer", model).stdout
    tokens = 2 * 3 + 3 + 5 + 40
    [line] = [line for line in shown.split("\n") if line.startswith("│    0 │")]
    assert int(line.split("│")[4]) == tokens
    assert "name the model's tokenizer with --tokenizer" in refused(path, *shape)


def test_what_cannot_be_planned_is_refused_in_one_line(path):
    assert "--mini-batch=3 x --n=2 = 6 rows" in refused(path, *SHAPE, "--strategy", "lcm", "--dp", 7)
    assert "packer='verl'" in refused(path, *SHAPE, "--sharing", get_args(Sharing)[-1])


def test_a_file_a_model_or_a_tokenizer_that_is_not_there_is_named_without_a_traceback(path, tmp_path):
    assert "none.jsonl" in refused(tmp_path / "none.jsonl", *SHAPE)
    for option in ("--tokenizer", "--page"):
        result = run(path, *SHAPE, option, tmp_path / "none" / "this.png")
        assert result.exit_code == 1
        assert "none/this.png" in result.stderr


def test_a_hundred_thousand_rows_are_planned_and_shown_in_a_few_lines(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1500), 0.9, 100_000), 16, 16384).astype(int).tolist()
    rows = [{"prompt": f"p{row // 8}", "session": row % 8, "tokens": each} for row, each in enumerate(lengths)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    output = run(path, "--dp", 64, "--mini-batch", 32, "--n", 8, "--budget", 16384).stdout
    lines = output.split("\n")
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in output, "a number or a heading is cut off"
    steps = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert steps[-1] == "all"
    assert any("more" in step for step in steps)
    numbers = [int(step) for step in steps if step.isdigit()]
    assert all(a < b for a, b in pairwise(numbers))
    assert numbers[-1] == math.ceil(100_000 / 8 / 32) - 1


SHARED_ROWS = [
    {"prompt": "a", "session": 0, "token_ids": [1, 2, 3]},
    {"prompt": "a", "session": 0, "token_ids": [1, 2, 3, 4, 5]},
    {"prompt": "b", "session": 0, "tokens": 4},
    {"prompt": "b", "session": 1, "token_ids": [1, 2, 3, 4]},
]
SHARED = get_args(Sharing)[-1]
SHARING = ("--dp", 1, "--mini-batch", 2, "--n", 2, "--budget", 64, "--packer", "plan", "--sharing", SHARED)


def test_what_rows_of_a_prompt_begin_with_is_computed_once(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", SHARED_ROWS)
    figures = plan_of(path, *SHARING)["figures"]
    assert figures["computed_tokens"] == 5 + 4 + 4
    assert figures["sharing_factor"] == pytest.approx(16 / 13)
    assert plan_of(path, *SHARING, "--sharing", "off")["figures"]["computed_tokens"] == 16
    assert "13 of 16 tokens computed: sharing factor 1.23" in run(path, *SHARING).stdout
    compared = plan_of(path, *SHARING, "--compare", "--budget", 256)["comparison"]
    assert {name: totals["computed_tokens"] for name, totals in compared.items()} == {
        "verl": 16,
        "plan_computing_all": 16,
        "plan": 13,
    }


def test_where_lengths_are_all_that_is_known_a_note_says_nothing_is_shared(path):
    result = run(path, *SHARING, "--budget", 1000, "--json")
    assert json.loads(result.stdout)["figures"]["sharing_factor"] == 1
    assert "nothing is shared" in result.stderr


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three steps of 64, 32 and 60 rows."""
    place = tmp_path / "rollouts"
    place.mkdir()
    for step, rows in ((2, ROWS[:32]), (10, ROWS[:60]), (1, ROWS)):
        write_lines(place / f"{step}.jsonl", rows)
    return place


ROWS = [{"prompt": f"p{row // 4}", "session": row % 4, "tokens": 10 + row} for row in range(64)]
OF_FOUR = ("--dp", 2, "--mini-batch", 4, "--n", 4, "--budget", 100)


def test_standard_input_is_planned_as_a_file_is(path):
    from_file = plan_of(path, *SHAPE)
    given = json.loads(run("-", *SHAPE, "--json", given=path.read_text()).stdout)
    assert given["file"] == "standard input"
    assert given["steps"] == from_file["steps"]
    assert "standard input, line 1 (row number 0): not a row" in run("-", *SHAPE, given="{").stderr


def test_a_pipe_with_a_name_is_read_once(path, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=[path.read_bytes()])
    writer.start()
    shown = plan_of(pipe, *SHAPE)
    writer.join()
    assert shown["steps"] == plan_of(path, *SHAPE)["steps"]


def test_each_file_of_a_folder_is_a_batch_with_a_line_in_the_order_of_steps(folder):
    result = run(folder, *OF_FOUR)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.split("\n") if "│" in line]
    assert [line[:3] for line in lines] == [
        ["1.jsonl", "4", "64"],
        ["2.jsonl", "2", "32"],
        ["10.jsonl", "4", "60"],
        ["all", "10", "156"],
    ]
    assert "--mini-batch=4: does not divide 15 prompts with rows." in result.stderr
    assert result.stderr.endswith("(1 of 3 files)\n")
    shown = plan_of(folder, *OF_FOUR, "--budget", 128, "--compare")
    alone = plan_of(folder / "2.jsonl", *OF_FOUR, "--budget", 128, "--compare")
    for key in ("steps", "comparison", "notes"):
        assert shown["batches"][1][key] == alone[key]
    rows = [batch["comparison"]["verl"]["rows"] for batch in shown["batches"]]
    assert rows == [64, 32, 60]
    assert shown["comparison"]["verl"]["rows"] == shown["comparison"]["plan"]["rows"] == sum(rows)


def test_of_a_folder_what_is_no_file_of_rows_is_named_and_left_out(folder):
    (folder / "3.jsonl").write_text(json.dumps(ROWS[0]) + "\n{\n")
    (folder / "7.jsonl").mkdir()
    (folder / "8.jsonl").write_text("[" * 100_000 + "\n")
    (folder / "9.jsonl").write_text(json.dumps({"form": 1, "step": 9, "update": 0, "keys": ["a"]}) + "\n")
    result = run(folder, *OF_FOUR, "--json")
    shown = json.loads(result.stdout)
    assert [Path(batch["file"]).name for batch in shown["batches"]] == ["1.jsonl", "2.jsonl", "10.jsonl"]
    assert len(shown["left_out"]) == 4
    assert all(left_out in result.stderr for left_out in shown["left_out"])
    assert "3.jsonl, line 2 (row number 1): not a row" in refused(folder / "3.jsonl", *OF_FOUR)


def test_a_row_past_the_budget_is_refused_with_its_key_and_the_option(tmp_path):
    strange = write_lines(tmp_path / "[bold]rows[red].jsonl", ROWS)
    shown = refused(strange, *OF_FOUR, "--budget", 72)
    assert f"{strange}: row 'p15_3_63' has 73 tokens" in shown
    assert "raise --budget until it holds 73" in shown
    assert run(strange, *OF_FOUR).stdout.startswith("[bold]rows[red].jsonl: 2 ranks")


def test_options_that_the_rows_do_not_bear_out_are_named_with_both_numbers(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    assert plan_of(file, *OF_FOUR)["notes"] == []
    (note,) = plan_of(file, *OF_FOUR, "--mini-batch", 5)["notes"]
    assert note.startswith("--mini-batch=5: does not divide 16 prompts with rows. The batch is planned as one of 20")
    assert plan_of(file, *OF_FOUR, "--n", 7)["notes"] == ["--n=7: a prompt has up to 4 sessions."]
    (note,) = plan_of(file, *OF_FOUR, "--dp", 32)["notes"]
    assert note == "32 ranks: some have nothing but pads in 4 of 4 optimizer steps."


def test_a_recorded_step_is_planned_with_what_its_rows_share(tmp_path):
    step, path = made_step(), tmp_path / "3.jsonl"
    write_steps([step], path)
    plan = plan_of(path, *SHARING)
    (rank,) = plan["steps"][0]["ranks"]
    assert sorted(row for micro_batch in rank["micro_batches"] for row in micro_batch["rows"]) == [0, 1, 2, 3]
    # 12, 20, 15 and 20 tokens: row 0 is the beginning of row 1, and row 2 has 7 tokens of it, the last computed again.
    assert plan["figures"]["computed_tokens"] == 20 + (15 - 6) + 20
    assert "1 of 4 rows, 29.9% of the tokens, add nothing to the gradient" in plan["notes"][0]
    write_steps([step, made_step(update=1)], path)
    both = plan_of(path, *SHARING)
    assert [Path(batch["file"]).name for batch in both["batches"]] == ["3.jsonl, update 0", "3.jsonl, update 1"]
    assert [batch["steps"] for batch in both["batches"]] == [plan["steps"]] * 2
    write_steps([made_step(rows=[])], path)
    assert "3.jsonl: holds laps alone. Record steps with padding.record=true." in refused(path, *SHARING)


def test_ranks_sizes_budget_and_settings_are_those_of_the_job(job, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    budgets = ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100")
    of_job = (*job, *budgets, "trainer.n_gpus_per_node=2", "+padding=prompt", "padding.packer=plan")
    by_job = plan_of(file, "--", *of_job)
    by_options = plan_of(file, "--dp", 2, "--mini-batch", 2, "--n", 4, "--budget", 100, "--packer", "plan")
    assert by_job["steps"] == by_options["steps"]
    assert (by_job["strategy"], by_job["packer"]) == ("prompt", "plan")
    page = tmp_path / "plan.html"
    assert run(file, "--page", page, "--", *of_job).exit_code == 0
    assert {"actor", "log_prob"} <= parsed(page).packed["step-1"]["charts"].keys()


def test_a_job_that_cannot_be_planned_for_is_refused_in_a_line(job, path):
    for options, arguments, cause in (
        (("--dp", 2), [*job, "+padding=prompt"], "--dp=2: the job's overrides say it"),
        ((), job, "Add +padding=prompt"),
        ((), [*job, "+padding=prompt", "nonsense=1"], "Could not override 'nonsense'"),
        ((), [*job, "+padding=prompt", "padding.strategy=x"], "padding.strategy='x'"),
        (("--dp", 2), [], "--mini-batch, --n, --budget: missing"),
    ):
        assert cause in refused(path, *options, "--", *arguments)


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_the_page_has_the_bars_of_the_plan_and_of_stock_verl(packer, path, rows, tmp_path):
    page, shape = tmp_path / "plan.html", (*SHAPE, "--dp", 2, "--packer", packer)
    assert run(path, *shape, "--compare", "--page", page).exit_code == 0
    charts = parsed(page).packed["step-1"]["charts"]
    assert list(charts) == ["actor", "verl", "plan"]
    for chart in charts.values():
        assert sorted(row for bar in chart["bars"] for row in bar[6]) == list(range(len(rows)))
    ends = {}
    for rank, _, micro_batch, start, _, length, *_ in charts["actor"]["bars"]:
        assert (micro_batch is None) == (packer == "verl")
        ends[rank] = max(ends.get(rank, 0), start + length)
    steps = plan_of(path, *shape)["steps"]
    if packer == "plan":
        slowest = sum(max(loads) for step in steps for loads in zip(*loads_of(step, rows), strict=True))
        assert [*ends.values()] == pytest.approx([slowest / cost_of(1000)] * 2)


def test_a_plan_has_the_curves_of_no_run_and_a_browser_shows_it(path, tmp_path):
    page = tmp_path / "plan.html"
    assert run(path, *PLANNED, "--page", page).exit_code == 0
    assert parsed(page).packed["curves"] == {"curves": {}, "first": []}
    assert parsed(page).links == ["data:,"]
