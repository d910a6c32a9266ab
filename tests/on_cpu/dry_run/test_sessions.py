"""The sessions stage of a dry run: what is wrong with a user's code is found by running it, and
right code passes."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.on_cpu.dry_run.own_jobs import AGENT, LOOP, REWARD, TOOL, TURNS, OwnJob, dry_run_of

RETURNED = "return outputs"
SCORE = "return 1.0 if ground_truth in solution_str else 0.0"
Overrides = Callable[[OwnJob], list[str]]


def sessions_of(own: OwnJob, *overrides: str, **options) -> tuple[int, str]:
    return dry_run_of(*own.overrides(*overrides), only="sessions", **options)


def line_of(text: str, mark: str) -> int:
    return 1 + next(n for n, line in enumerate(text.splitlines()) if mark in line)


def at(file: str, text: str, mark: str) -> str:
    """Where Python's traceback shows a line."""
    return f'{file}", line {line_of(text, mark)}'


def with_loop(old: str = "", new: str = "", **named: str) -> Overrides:
    """A job whose agent loop has something else in it."""
    return lambda own: [*own.loop(LOOP.replace(old, new, 1), **named), *own.reward()]


def with_reward(text: str) -> Overrides:
    return lambda own: own.reward(text)


def with_data(**columns: Any) -> Overrides:
    return lambda own: [own.data(**columns), *own.reward()]


def with_file(setting: str, text: str, *more: str, name: str = "data_of_mine.py") -> Overrides:
    return lambda own: [f"{setting}={own.file(name, text)}", *more, *own.reward()]


def with_template(text: str) -> Overrides:
    return lambda own: [own.template(text), *own.reward()]


DATA_SET = """from verl.utils.dataset.rl_dataset import RLHFDataset
class Mine(RLHFDataset):
    def __getitem__(self, item):
        return super().__getitem__(item)['question']
"""
TOOLS = "tools:\n  - class_name: nowhere.Tool\n    config: {type: native}\n    tool_schema: {}\n"


WRONG: dict[str, tuple[Overrides, tuple[str, ...]]] = {
    "no prompt column": (with_data(prompt=None), ("prompt",)),
    "no column for rewards": (lambda own: [own.data(data_source=None)], ("data_source",)),
    "a data source that verl has no score for": (lambda own: [], ("mine",)),
    "a file of agent loops that is no YAML": (
        lambda own: [
            f"{AGENT}.agent_loop_config_path={own.file('agent.yaml', '- name: [')}",
            *own.reward(),
        ],
        ("agent.yaml",),
    ),
    "a sampling parameter that no other process can get": (
        with_loop(
            "sampling_params=sampling_params", "sampling_params={'stop': (each for each in ids)}"
        ),
        ("cannot pickle", at("loop_of_mine.py", LOOP, "self.server_manager")),
    ),
    "a misspelt attribute": (
        with_loop("self.server_manager", "self.server_manger"),
        ("server_manger", at("loop_of_mine.py", LOOP, "self.server_manager")),
    ),
    "a loop that returns nothing": (with_loop(RETURNED, "return []"), ("no row",)),
    "a mask shorter than its response": (
        with_loop("response_mask=[1] * len(reply.token_ids)", "response_mask=[1]"),
        ("response_mask",),
    ),
    "a reward that is a tuple": (with_reward(REWARD.replace(SCORE, "return 1.0, {}")), ("tuple",)),
    "a reward that raises": (
        with_reward(REWARD.replace("return 1.0 if", "return extra_info['answer'] if")),
        (
            "KeyError: 'answer'",
            at("reward_of_mine.py", REWARD, SCORE),
        ),
    ),
    "a tool class that is not there": (
        with_file(
            f"{TURNS}.tool_config_path",
            TOOLS,
            f"{AGENT}.default_agent_loop=tool_agent",
            name="tools.yaml",
        ),
        ("'loader'",),
    ),
    "a user-defined data set that raises": (
        with_file("data.custom_cls.path", DATA_SET, "data.custom_cls.name=Mine"),
        (
            "KeyError: 'question'",
            at("data_of_mine.py", DATA_SET, "question"),
        ),
    ),
}
"""What makes a job wrong, and words of what is said of it."""


@pytest.mark.parametrize(("overrides", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found_by_running_it_and_shown_with_its_place(overrides, words, own):
    code, said = sessions_of(own, *overrides(own))
    assert code == 1, said
    assert [each for each in words if each not in said] == [], said


RIGHT: dict[str, Overrides] = {
    "one turn": with_reward(REWARD),
    "a reward with more than a score": with_reward(
        "def compute_score(**given):\n    return {'score': 1.0, 'accuracy': 0.5, 'note': 'well'}\n"
    ),
    "rewards of the loop itself": lambda own: own.loop(
        LOOP.replace(
            "dict(reply.extra_fields)",
            "reply.extra_fields | {'reward_extra_info': {}}, reward_score=0.5",
        )
    ),
    "tools": lambda own: [*own.tool(), *own.reward()],
    "prompts as lines": with_data(name="train.jsonl"),
    "a validation": lambda own: [
        *own.reward(),
        "trainer.val_before_train=true",
        "trainer.test_freq=5",
    ],
    "verl's DAPO rewards": lambda own: [*own.reward(), "reward.reward_manager.name=dapo"],
}


@pytest.mark.parametrize("overrides", RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(overrides, own):
    code, said = sessions_of(own, *overrides(own))
    assert code == 0, said
    assert "rows a session" in said


def test_rows_and_sessions_are_counted(own):
    code, said = sessions_of(own, *own.loop(), *own.reward())
    assert code == 0, said
    assert "16 rows of 8 sessions" in said
    assert "rows a session: 2 (8 sessions)" in said


def test_a_tool_that_raises_is_shown_though_verl_goes_on(own, caplog):
    tools = own.tool(TOOL.replace("return str(len(expression))", "raise ValueError('no sum')"))
    more = ["data.max_response_length=256", "reward.reward_model.enable=true"]
    code, said = sessions_of(own, *tools, *own.reward(), *more)
    assert code == 0, said
    assert "no sum" in caplog.text
    assert "left out: reward.reward_model" in said


HOLDS_THE_LOCK = "import re; re.match('(a+)+$', 'a' * 60 + 'b')"


@pytest.mark.parametrize("forever", ["import asyncio; await asyncio.sleep(1e6)", HOLDS_THE_LOCK])
def test_a_loop_that_does_not_end_is_shown_with_the_line_that_hangs(own, forever):
    text = LOOP.replace(RETURNED, f"{forever}  # here")
    job = own.overrides(*own.loop(text), *own.reward())
    command = [
        sys.executable,
        "-m",
        "verl_padding",
        "dry-run",
        "--only",
        "sessions",
        "--timeout",
        "6",
        *job,
    ]
    ended = subprocess.run(
        command, cwd=own.folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    where = at("loop_of_mine.py", text, "# here") + ", in run"
    by_interpreter = f"{at('loop_of_mine.py', text, '# here')} in run"
    said = ended.stdout + ended.stderr
    assert where in said or by_interpreter in said, said


REMEMBERS = """
def compute_score(ground_truth, extra_info, **given):
    first = not extra_info.get("seen")
    extra_info["seen"] = True
    return {"score": 1.0 if first else extra_info["kept_by_the_first"]}
"""
"""Right only where each session's reward has data of its own: if sessions share them, the second
raises KeyError."""
NEEDS_ANOTHERS = """
def compute_score(ground_truth, extra_info, **given):
    if not compute_score.called:
        compute_score.called = True
        extra_info["seen"] = 1.0
    return extra_info["seen"]
compute_score.called = False
"""


def test_a_reward_that_writes_into_its_data_writes_into_its_own(own):
    code, said = sessions_of(own, *own.reward(REMEMBERS))
    assert code == 0, said
    code, said = sessions_of(own, *own.reward(NEEDS_ANOTHERS))
    assert code == 1, said
    # Four prompts of two sessions: of the first session alone the data have what it has written.
    assert "7 sessions have failed" in said
    assert "KeyError: 'seen'" in said
