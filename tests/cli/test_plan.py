"""The command ``verl-padding plan``."""

import json

import numpy as np
from typer.testing import CliRunner

from tests.support.fresh_processes import run_fresh
from verl_padding.cli.app import app
from verl_padding.on_cpu.tiny_models import make_tiny_model

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


def plan_of(*args):
    result = run("--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


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
    result = run(path, *shape, "--json", "--tokenizer", model, *flag)
    plan = json.loads(result.stdout)
    assert sorted(plan["steps"][0]["ranks"][0]["rows"]) == [0, 1, 3]
    shown = run(path, *shape, "--tokenizer", model, *flag).stdout
    tokens = 2 * 3 + 3 + 5 + 40
    [line] = [line.split() for line in shown.split("\n") if line.startswith("0 ")]
    assert int(line[3]) == tokens
    assert "name the model's tokenizer with --tokenizer" in refused(path, *shape)


SHARING = ("--dp", 1, "--mini-batch", 2, "--n", 2, "--budget", 256)
SHARED = ("--", "+padding=prompt", "padding.packer=plan", "padding.sharing=on")


def test_without_a_flag_a_plan_is_that_of_fast(path):
    plain, fast = (plan_of(path, *SHAPE, *flag) for flag in ((), ("--", "+padding=fast")))
    assert (plain["optimizer_steps"], plain["packer"]) == ("by_rows", "plan")
    assert plain["steps"] == fast["steps"]


def test_settings_of_the_padding_alone_are_of_no_job(path):
    shown = plan_of(path, "--", "+padding=rows", "padding.packer=plan")
    assert (shown["strategy"], shown["packer"]) == ("rows", "plan")
