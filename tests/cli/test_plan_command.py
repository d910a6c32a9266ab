"""The command ``verl-padding plan``."""

import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from typer.testing import CliRunner
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from tests.support.pixels import pixels_of
from verl_padding.cli.app import app
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.plan.cost import attention_cost
from verl_padding.runs import charts
from verl_padding.runs.charts import WAITING

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
    result = run(*args, "--json")
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


def test_what_cannot_be_planned_is_refused_in_one_line(path, tmp_path):
    assert "--mini-batch=3 x --n=2 = 6 rows" in refused(path, *SHAPE, "--strategy", "lcm", "--dp", 7)
    assert "packer='verl'" in refused(path, *SHAPE, "--sharing", "chains")
    config = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "choose cost_model=attention" in refused(path, *SHAPE, "--cost-model", tmp_path)


def test_a_file_a_model_or_a_tokenizer_that_is_not_there_is_named_without_a_traceback(path, tmp_path):
    assert "none.jsonl" in refused(tmp_path / "none.jsonl", *SHAPE)
    for option in ("--cost-model", "--tokenizer", "--picture"):
        result = run(path, *SHAPE, option, tmp_path / "none" / "this.png")
        assert result.exit_code == 1
        assert "none/this.png" in result.stderr


def test_the_cost_may_be_that_of_a_model(path, tmp_path):
    model = make_tiny_model("qwen2", tmp_path)
    by_model, by_tokens = (plan_of(path, *SHAPE, "--cost-model", name) for name in (model, "tokens"))
    assert by_model["figures"]["over_lower_bound"] != by_tokens["figures"]["over_lower_bound"]


def test_what_a_models_file_leaves_out_is_what_its_kind_has_by_default(path, tmp_path):
    # Neither which layers slide nor how wide a head is: every other layer, and 256, for this kind.
    config = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "sliding_window": 8,
    }
    model = tmp_path / "model"
    plans = []
    for named in ({}, {"head_dim": 256, "layer_types": ["sliding_attention", "full_attention"] * 2}):
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config | named))
        figures = plan_of(path, *SHAPE, "--cost-model", model)["figures"]
        plans.append({name: figure for name, figure in figures.items() if name != "plan_seconds"})
    assert plans[0] == plans[1]


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_the_picture_shows_rows_pads_and_waiting_and_with_compare_stock_verl_beside_it(packer, path, tmp_path):
    picture = tmp_path / "plan.png"
    shape = (path, "--packer", packer, *SHAPE, "--n", 4)
    assert run(*shape, "--picture", picture).exit_code == 0
    pixels, width = pixels_of(picture), image.imread(picture).shape[1]
    for colour in (charts.OURS, charts.PADS, WAITING["edgecolor"]):
        assert pixels(colour) > 50, colour
    assert (pixels(charts.OURS_LIGHT) > 50) is (packer == "plan"), "verl's packer is asked for the comparison alone"
    assert pixels(charts.STOCK) == pixels(charts.STOCK_LIGHT) == 0
    assert run(*shape, "--picture", picture, "--compare").exit_code == 0
    pixels = pixels_of(picture)
    for colour in (charts.OURS, charts.OURS_LIGHT, charts.STOCK, charts.STOCK_LIGHT, charts.PADS):
        assert pixels(colour) > 50, colour
    assert image.imread(picture).shape[1] == 2 * width


def test_the_bars_of_the_picture_end_where_the_slowest_rank_of_each_micro_batch_does(path, rows, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(charts, "save_chart", lambda figure, path: drawn.append(figure))
    assert run(path, *PLANNED, "--picture", tmp_path / "plan.png").exit_code == 0
    steps = plan_of(path, *PLANNED)["steps"]
    for axes, step in zip(drawn[0].axes, steps, strict=True):
        slowest = sum(map(max, zip(*loads_of(step, rows), strict=True)))
        ends: dict[float, float] = {}  # by height: of each rank, with what it waits
        for bar in axes.patches:
            ends[bar.get_y()] = max(ends.get(bar.get_y(), 0), bar.get_x() + bar.get_width())
        assert [*ends.values()] == pytest.approx([slowest / cost_of(1000)] * 4)


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


CHAINS = [
    {"prompt": "a", "session": 0, "token_ids": [1, 2, 3]},
    {"prompt": "a", "session": 0, "token_ids": [1, 2, 3, 4, 5]},
    {"prompt": "b", "session": 0, "tokens": 4},
    {"prompt": "b", "session": 0, "tokens": 9, "extends": 2},
    {"prompt": "b", "session": 1, "tokens": 9},
]
SHARED = ("--dp", "1", "--mini-batch", "2", "--n", "2", "--budget", "64", "--packer", "plan", "--sharing", "chains")


def test_rows_that_extend_each_other_are_computed_once_with_sharing(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", CHAINS)
    figures = plan_of(path, *SHARED)["figures"]
    assert figures["computed_tokens"] == 5 + 9 + 9
    assert figures["sharing_factor"] == pytest.approx(30 / 23)
    assert plan_of(path, *SHARED, "--sharing", "off")["figures"]["computed_tokens"] == 30
    assert "23 of 30 tokens computed: sharing factor 1.30" in run(path, *SHARED).stdout
    assert "sharing factor" not in run(path, *SHARED, "--sharing", "off").stdout


def test_without_a_word_on_which_row_extends_which_nothing_is_shared_and_a_note_reports_so(path):
    result = run(path, *PLANNED, "--sharing", "chains", "--json")
    assert json.loads(result.stdout)["figures"]["sharing_factor"] == 1
    assert "--sharing chains: nothing is shared" in result.stderr


# Prompt, session, tokens and reward of each row. The sessions of p1 have earned the same, by their last rows, and so
# have those of p2; p4 has one session, whose advantage is its reward.
ROWS_OF = re.compile(r'"rows": \[([\d, ]+)\]')
REWARDED = [
    *[("p0", 0, 30, 0.0), ("p0", 1, 30, 1.0), ("p1", 0, 10, 0.5), ("p1", 1, 20, 7.0), ("p1", 1, 30, 0.5)],
    *[("p2", 0, 40, 0.0), ("p2", 1, 40, 0.0), ("p3", 0, 50, 1.0), ("p3", 1, 10, 0.0), ("p4", 0, 60, 1.0)],
]


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_prompts_whose_sessions_have_all_earned_the_same_are_told_and_may_be_left_out(packer, tmp_path):
    path = tmp_path / "rows.jsonl"
    names = "prompt", "session", "tokens", "reward"
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in REWARDED))
    shape = ("--dp", "1", "--mini-batch", "5", "--n", "2", "--budget", "128", "--packer", packer)
    less = plan_of(path, *shape, "--idle-rows", "skip", "--compare")
    # 10 + 20 + 30 + 40 + 40 of 320 tokens.
    assert "5 of 10 rows, 43.8% of the tokens" in "".join(less["notes"])
    numbers = {int(digits) for held in ROWS_OF.findall(json.dumps(less["steps"])) for digits in held.split(", ")}
    assert numbers == {0, 1, 7, 8, 9}
    compared = {name: (figures["rows"], figures["tokens"]) for name, figures in less["comparison"].items()}
    assert compared == {"verl": (10, 320), "plan_computing_idle_rows": (10, 320), "plan": (5, 180)}
    assert less["comparison"]["plan"]["over_perfect"] < less["comparison"]["plan_computing_idle_rows"]["over_perfect"]
