"""Act 1 of a rehearsal: what is wrong with a user's own code is found by running it, and what is right passes."""

import subprocess
import sys
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from tests.rehearsal.own_jobs import AGENT, LOOP, REWARD, TOOL, TURNS, OwnJob
from verl_padding.cli.rehearse import rehearse
from verl_padding.job.composition import JobArguments

REPLY = "2 it is"
RETURNED = "return outputs"


def rehearsed(*overrides: str, **options) -> tuple[int, str]:
    console = Console(width=1000, record=True, file=StringIO())
    options = {"replies": [REPLY], "timeout_s": 120} | options
    code = rehearse(JobArguments(overrides=overrides), console=console, only="sessions", **options)
    return code, console.export_text()


def lines_of(text: str, mark: str) -> str:
    """``file:line`` of the line that has a mark."""
    return str(1 + next(n for n, line in enumerate(text.splitlines()) if mark in line))


def with_loop(own: "OwnJob", old: str, new: str) -> list[str]:
    """Overrides of a job whose agent loop has something else in it."""
    return [*own.loop(LOOP.replace(old, new)), *own.reward()]


def no_prompt_column(own: OwnJob):
    return [own.data(prompt=None)], ["prompt"]


def prompts_that_are_text(own: OwnJob):
    return [own.data(prompt=lambda row: "one")], ["sessions"]


def a_null_prompt(own: OwnJob):
    return [own.data(prompt=lambda row: None)], ["sessions"]


def no_column_for_rewards(own: OwnJob):
    return [own.data(data_source=None)], ["data_source"]


def a_data_source_that_verl_has_no_score_for(own: OwnJob):
    return [], ["mine"]


def a_column_validate(own: OwnJob):
    return [own.data(validate=lambda row: True), *own.reward()], ["data.train_files", "validate"]


def a_filter_that_leaves_nothing(own: OwnJob):
    return [own.data(), "data.max_prompt_length=2", "data.filter_overlong_prompts=true"], ["data.train_files"]


def a_file_that_is_not_there(own: OwnJob):
    return ["data.train_files=/nowhere.parquet"], ["/nowhere.parquet"]


def a_template_that_renders_nothing(own: OwnJob):
    return [own.template("hello"), *own.reward()], ["template"]


def a_template_that_refuses_a_role(own: OwnJob):
    refusing = "{% for m in messages %}{{ raise_exception('no such role: ' + m.role) }}{% endfor %}"
    return [own.template(refusing), *own.reward()], ["no such role: user"]


def no_such_loop(own: OwnJob):
    return [f"{AGENT}.default_agent_loop=nobodys", *own.reward()], ["nobodys", "not registered"]


def a_loop_of_another_name(own: OwnJob):
    return [*own.loop(name="yours"), *own.reward()], ["mine", "not registered"]


def a_module_that_is_not_there(own: OwnJob):
    loop = own.loop()
    (own.folder / "loop_of_mine.py").unlink()
    return [*loop, *own.reward()], ["loop_of_mine"]


def a_class_that_is_not_there(own: OwnJob):
    return with_loop(own, "class Mine", "class Yours"), ["Mine"]


def a_loop_that_imports_what_is_not_there(own: OwnJob):
    return [*own.loop("import nobodys_module\n" + LOOP), *own.reward()], ["nobodys_module"]


def a_misspelt_attribute(own: OwnJob):
    text = LOOP.replace("self.server_manager", "self.server_manger")
    return [*own.loop(text), *own.reward()], [
        "server_manger",
        f"loop_of_mine.py:{lines_of(text, 'server_manger')}",
        AGENT,
    ]


def a_loop_that_raises(own: OwnJob):
    text = LOOP.replace(RETURNED, "raise KeyError('state')")
    return [*own.loop(text), *own.reward()], ["KeyError", f"loop_of_mine.py:{lines_of(text, 'raise KeyError')}", AGENT]


def a_run_that_is_not_async(own: OwnJob):
    text = LOOP.replace("async def run", "def run").replace("await ", "")
    return [*own.loop(text), *own.reward()], ["sessions"]


def a_run_that_yields(own: OwnJob):
    return with_loop(own, RETURNED, "yield outputs"), ["async_generator"]


def a_loop_that_returns_a_dict(own: OwnJob):
    return with_loop(own, RETURNED, "return {'response_ids': [1]}"), ["sessions"]


def a_loop_that_returns_nothing(own: OwnJob):
    return with_loop(own, RETURNED, "return []"), ["no row"]


def a_mask_shorter_than_its_response(own: OwnJob):
    text = LOOP.replace("response_mask=[1] * len(reply.token_ids)", "response_mask=[1]")
    return [*own.loop(text), *own.reward()], ["response_mask"]


def no_log_probs(own: OwnJob):
    return with_loop(own, "response_logprobs=reply.log_probs,", ""), ["rollout_log_probs"]


def no_age(own: OwnJob):
    return with_loop(own, "extra_fields=dict(reply.extra_fields)", "extra_fields={}"), ["min_global_steps"]


def an_output_without_what_it_needs(own: OwnJob):
    text = LOOP.replace("response_ids=reply.token_ids,", "")
    return [*own.loop(text), *own.reward()], ["response_ids", "loop_of_mine.py"]


def a_text_in_the_place_of_tokens(own: OwnJob):
    return with_loop(own, "prompt_ids=ids, sampling", "prompt_ids=str(ids), sampling"), ["str"]


def tokens_that_the_model_lacks(own: OwnJob):
    text = LOOP.replace("prompt_ids=ids, sampling", "prompt_ids=[99999], sampling")
    return [*own.loop(text), *own.reward()], ["99999", "vocab_size"]


def a_reward_that_is_a_tuple(own: OwnJob):
    return own.reward(REWARD.replace("return 1.0 if ground_truth in solution_str else 0.0", "return 1.0, {}")), [
        "tuple"
    ]


def a_reward_without_a_score(own: OwnJob):
    text = REWARD.replace("return 1.0 if ground_truth in solution_str else 0.0", "return {'accuracy': 1.0}")
    return own.reward(text), ["'score'"]


def a_reward_that_is_nothing(own: OwnJob):
    return own.reward("def compute_score(**given):\n    pass\n"), ["rm_scores"]


def a_reward_that_raises(own: OwnJob):
    text = REWARD.replace("return 1.0 if", "return extra_info['answer'] if")
    told = f"reward_of_mine.py:{lines_of(text, 'answer')}"
    return own.reward(text), ["KeyError: 'answer'", told, "reward.custom_reward_function.path"]


def a_reward_of_another_name(own: OwnJob):
    return own.reward(REWARD.replace("compute_score", "score")), ["compute_score"]


def a_reward_of_other_arguments(own: OwnJob):
    return own.reward("def compute_score(prompt, answer):\n    return 1.0\n"), ["unexpected keyword argument"]


def a_reward_that_is_not_python(own: OwnJob):
    return own.reward("def compute_score(\n"), ["reward_of_mine.py"]


def a_tool_that_is_not_python(own: OwnJob):
    return [*own.tool("@function_tool\ndef add(\n"), *own.reward()], ["tool_of_mine.py"]


def a_tool_class_that_is_not_there(own: OwnJob):
    tools = own.file(
        "tools.yaml", "tools:\n  - class_name: nowhere.Tool\n    config: {type: native}\n    tool_schema: {}\n"
    )
    return [f"{TURNS}.tool_config_path={tools}", f"{AGENT}.default_agent_loop=tool_agent", *own.reward()], [
        "tool_config_path"
    ]


def a_data_set_of_ones_own_that_raises(own: OwnJob):
    text = (
        "from verl.utils.dataset.rl_dataset import RLHFDataset\n\n\nclass Mine(RLHFDataset):\n"
        "    def __getitem__(self, item):\n        return super().__getitem__(item)['question']\n"
    )
    path = own.file("data_of_mine.py", text)
    named = [f"data.custom_cls.path={path}", "data.custom_cls.name=Mine"]
    return [*named, *own.reward()], ["KeyError: 'question'", "data_of_mine.py:6", "data.custom_cls.path"]


def a_data_set_class_that_is_not_there(own: OwnJob):
    path = own.file("data_of_mine.py", "")
    return [f"data.custom_cls.path={path}", "data.custom_cls.name=Mine", *own.reward()], ["Mine"]


def a_field_that_no_pad_can_have(own: OwnJob):
    text = LOOP.replace(
        "class Mine",
        "class Output(AgentLoopOutput):\n    notes: object = None\n\n    def as_dict(self):\n"
        "        import torch\n        notes = torch.zeros(3 + len(self.response_ids))\n"
        "        return super().as_dict() | {'notes': notes}\n\n\nclass Mine",
    )
    text = text.replace("                AgentLoopOutput(", "                Output(")
    return [*own.loop(text), *own.reward()], ["notes", "role"]


WRONG: list[Callable[[OwnJob], tuple[list[str], list[str]]]] = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}) == {"own": OwnJob}
]


def test_as_many_cases_as_were_promised_are_tried():
    assert len(WRONG) >= 38


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_wrong_is_found_by_running_it_and_told_with_where_it_is(case, own):
    overrides, told = case(own)
    code, said = rehearsed(*own.overrides(*overrides))
    assert code == 1, said
    for words in told:
        assert words in said, said


def one_turn(own):
    return own.reward()


def a_reward_with_more_than_a_score(own):
    more = "def compute_score(**given):\n    return {'score': 1.0, 'accuracy': 0.5, 'note': 'well'}\n"
    return own.reward(more)


def an_async_reward(own):
    return own.reward("async def compute_score(**given):\n    return 1.0\n")


def several_rows_a_session(own):
    return [*own.loop(), *own.reward()]


def rewards_of_the_loop_itself(own):
    return own.loop(
        LOOP.replace("dict(reply.extra_fields)", "reply.extra_fields | {'reward_extra_info': {}}, reward_score=0.5")
    )


def tools(own):
    return [*own.tool(), *own.reward()]


def prompts_as_lines(own):
    return [own.data(name="train.jsonl"), *own.reward()]


def a_validation(own):
    return [*own.reward(), "trainer.val_before_train=true", "trainer.test_freq=5"]


def a_system_message(own):
    two = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
    return [own.data(prompt=lambda row: two), *own.reward()]


def verls_dapo_rewards(own):
    return [*own.reward(), "reward.reward_manager.name=dapo"]


def no_padding(own):
    return [*own.loop(), *own.reward(), "~padding"]


@pytest.mark.parametrize(
    "case",
    [
        one_turn,
        a_reward_with_more_than_a_score,
        an_async_reward,
        several_rows_a_session,
        rewards_of_the_loop_itself,
        tools,
        prompts_as_lines,
        a_validation,
        a_system_message,
        verls_dapo_rewards,
    ],
    ids=lambda case: case.__name__,
)
def test_what_is_right_passes(case, own):
    code, said = rehearsed(*own.overrides(*case(own)))
    assert code == 0, said
    assert "rows a session" in said


def test_rows_replies_and_the_place_where_rows_part_are_shown(own):
    text = LOOP.replace("ids = ids + reply.token_ids", "ids = ids + reply.token_ids[1:]")
    code, said = rehearsed(*own.overrides(*own.loop(text), *own.reward()))
    assert code == 0, said
    assert "16 rows of 8 sessions" in said
    assert "rows a session: 2 (8 sessions)" in said
    assert "parts from the row before it in that one's response" in said
    code, said = rehearsed(*own.overrides(*own.loop(module="next_of_mine"), *own.reward()))
    assert "begins with all of the row before it" in said


def test_a_tool_that_raises_is_shown_though_verl_goes_on(own):
    tools = own.tool(TOOL.replace("return str(len(expression))", "raise ValueError('no sum')"))
    code, said = rehearsed(*own.overrides(*tools, *own.reward(), "data.max_response_length=256"))
    assert code == 0, said
    assert "no sum" in said


def test_tools_and_rewards_may_be_left_out(own):
    broken = [*own.tool("raise SystemError\n"), *own.reward("raise SystemError\n")]
    assert rehearsed(*own.overrides(*broken))[0] == 1
    code, said = rehearsed(*own.overrides(*broken), with_tools=False, with_rewards=False)
    assert code == 0, said


@pytest.mark.parametrize("forever", ["while True: pass", "import asyncio; await asyncio.sleep(1e6)"])
def test_a_loop_that_does_not_end_is_told_with_the_line_that_hangs(own, forever):
    text = LOOP.replace(RETURNED, f"{forever}  # here")
    job = own.overrides(*own.loop(text), *own.reward())
    command = [sys.executable, "-m", "verl_padding", "rehearse", "--only", "sessions", "--timeout", "15", *job]
    ended = subprocess.run(command, cwd=own.folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    said = ended.stdout.replace("\n", "")
    assert f"loop_of_mine.py:{lines_of(text, '# here')}" in said, ended.stdout
