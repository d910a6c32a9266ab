"""The command ``verl-padding plan``."""

import json
import re

import numpy as np
from typer.testing import CliRunner

from tests.record.test_step_file import made_step
from tests.support.fresh_processes import run_fresh
from verl_padding.cli.app import app
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.record.step_file import write_steps

SHAPE = ("--dp", "4", "--mini-batch", "3", "--n", "2", "--budget", "1000")
PLAN_PACKER = ("--", "+padding=prompt", "padding.packer=plan")


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(n_prompts):
    """Rows of prompts with two sessions, of one to three rows each."""
    rng = np.random.default_rng(0)
    return [
        {"prompt": f"p{prompt}", "session": session, "tokens": int(rng.integers(10, 900))}
        for prompt in range(n_prompts)
        for session in range(2)
        for _ in range(int(rng.integers(1, 4)))
    ]


def run(*args, given=None):
    return CliRunner().invoke(app, ["plan", *map(str, args)], input=given)


def shown(*args):
    """What is printed of a plan."""
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def numbers(*args):
    """The lines of the table, by their first column."""
    lines = [line.split() for line in shown(*args).splitlines()]
    return {line[0]: [*map(float, line[1:])] for line in lines if re.fullmatch(r"\d+|all", line[0])}


def refused(*args):
    result = run(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().split("\n")) == 1
    return result.stderr


def test_a_plan_needs_no_word_on_the_platform(path):
    code = "from verl_padding.cli.app import app; app()"
    done = run_fresh(code, "plan", str(path), *SHAPE, platform=None)
    assert done.returncode == 0, done.stderr
    assert "optimizer_steps" in done.stdout


def dump_line(uid, output):
    return json.dumps(
        {"input": "ab", "output": output, "gts": None, "score": 1.0, "uid": uid}, ensure_ascii=False
    )


def test_a_dump_is_tokenized_and_its_stock_pads_are_left_out(tmp_path):
    path = tmp_path / "1.jsonl"
    # One token a byte; U+2028 would break the line for a reader that splits at it.
    texts = {"q_0_0": "xyz", "q_0_1": "a\u2028b", "pad77_0_0": "", "r_1_0": "z" * 40}
    path.write_text("".join(dump_line(uid, text) + "\n" for uid, text in texts.items()))
    model = make_tiny_model("qwen2", tmp_path)
    shape = ("--dp", "1", "--mini-batch", "2", "--n", "1", "--budget", "100")
    flag = ("--", "+padding=prompt")
    real_rows, _, tokens, *_ = numbers(path, *shape, "--tokenizer", model, *flag)["all"]
    assert (real_rows, tokens) == (3, 2 * 3 + 3 + 5 + 40)
    assert "name the model's tokenizer with --tokenizer" in refused(path, *shape)


SHARING = ("--dp", 1, "--mini-batch", 2, "--n", 2, "--budget", 256)
SHARED = ("--", "+padding=prompt", "padding.packer=plan", "padding.sharing=on")


def test_without_a_flag_a_plan_is_that_of_fast(path):
    plain, fast = (shown(path, *SHAPE, *flag) for flag in ((), ("--", "+padding=fast")))
    assert "optimizer_steps by_rows, packer plan" in plain
    assert plain == fast


def test_settings_of_the_padding_alone_are_of_no_job(path):
    settings = shown(path, "--", "+padding=rows", "padding.packer=plan")
    assert "strategy rows, optimizer_steps configured, packer plan" in settings


ROWS = [{"prompt": f"p{row // 4}", "session": row % 4, "tokens": 10 + row} for row in range(64)]


def test_a_recorded_step_is_planned_with_what_its_rows_share(tmp_path):
    step, path = made_step(), tmp_path / "3.jsonl"
    write_steps([step], path)
    # 12, 20, 15 and 20 tokens: row 0 is the beginning of row 1, and row 2 has 7 tokens of it, the
    # last computed again.
    real_rows, _, tokens, computed, *_ = numbers(path, *SHARING, *SHARED)["all"]
    assert (real_rows, tokens, computed) == (4, 12 + 20 + 15 + 20, 20 + (15 - 6) + 20)
    assert "1 of 4 rows, 29.9% of the tokens" in run(path, *SHARING, *SHARED).stderr
    one = shown(path, *SHARING, *SHARED)
    write_steps([step, made_step(update=1)], path)
    both = shown(path, *SHARING, *SHARED)
    assert both == "".join(one.replace("3.jsonl", f"3.jsonl, update {n}") for n in (0, 1))


def test_ranks_sizes_budget_and_settings_are_those_of_the_job(job, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    budgets = (
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    )
    of_job = (*job, *budgets, "trainer.n_gpus_per_node=2", "+padding=prompt", "padding.packer=plan")
    by_job = shown(file, "--", *of_job)
    sizes = ("--dp", 2, "--mini-batch", 2, "--n", 4, "--budget", 100)
    assert by_job == shown(file, *sizes, *PLAN_PACKER)
    assert "2 ranks, strategy prompt, optimizer_steps configured, packer plan" in by_job


def test_a_job_that_cannot_be_planned_for_is_refused_in_a_line(job, path):
    for arguments, cause in (
        (job, "Add +padding=fast"),
        ([*job, "+padding=prompt", "nonsense=1"], "nonsense=1"),
        ([*job, "+padding=prompt", "padding.strategy=x"], "padding.strategy='x'"),
    ):
        assert cause in refused(path, "--", *arguments)
