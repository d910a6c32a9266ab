"""``verl-padding doctor`` reads code of the user's own, and runs none of it."""

import ast

import pytest
from omegaconf import OmegaConf

from tests.support.jobs_for_doctor import matters
from verl_padding.doctor.named_objects import refuse_missing_imports
from verl_padding.doctor.rewards import rewards_of_job, scores_source
from verl_padding.doctor.signatures import class_of_target, defined_in, lacks_attribute, method
from verl_padding.doctor.tools import tools_of_job

FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


TOOL = """\
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: one.
        {second}
    '''
    return a + b
"""


@pytest.mark.parametrize(
    "after",
    [
        "compute_score = adapt(compute_score)\n",
        "from rewards import compute_score\n",
        "if True:\n    def compute_score(*args): ...\n",
        "globals()['compute_score'] = len\n",
    ],
)
def test_a_function_that_is_bound_anew_is_not_taken_for_the_first_one(after, tmp_path):
    source = tmp_path / "reward.py"
    source.write_text(FUNCTION)
    assert isinstance(defined_in(source, "compute_score"), ast.FunctionDef)
    source.write_text(FUNCTION + after)
    assert defined_in(source, "compute_score") is None


def test_what_a_class_extends_is_read_in_verls_files_and_no_module_is_imported(tmp_path, monkeypatch):
    def imports(name: str, *more: str) -> None:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr("importlib.import_module", imports)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"loops_of_{tmp_path.name}"
    source = tmp_path / f"{name}.py"

    def lacks(text: str) -> bool:
        source.write_text(text)
        found = class_of_target(f"{name}.Mine")
        assert found is not None
        return lacks_attribute(*found, "run")

    package = "from verl.experimental.agent_loop import {0}\nclass Mine({0}):\n    x = 1\n"
    assert lacks(package.format("AgentLoopBase")), "its run is abstract"
    assert not lacks(package.format("SingleTurnAgentLoop"))
    assert lacks("class Mine: ...\n")
    assert not lacks("class Mine: ...\nMine.run = print\n")
    again = "class AgentLoopBase(AgentLoopBase):\n    async def run(self): ...\n"
    assert not lacks(package.format("AgentLoopBase").replace("class Mine", f"{again}class Mine"))


def test_a_class_that_cannot_be_known_without_a_run_is_not_looked_into(tmp_path):
    (tmp_path / "loops.py").write_text("from x import Mine\nclass Mine(Mine): ...\n")
    assert defined_in(tmp_path / "loops.py", "Mine") is None


def test_a_method_that_is_wrapped_is_not_read(tmp_path):
    (owner,) = ast.parse("class Mine:\n    def run(self): ...\n    run = traced(run)\n").body
    assert isinstance(owner, ast.ClassDef)
    assert method(owner, "run") is None


def test_imports_after_a_change_of_pythons_path_are_let_pass(tmp_path):
    source = tmp_path / "reward.py"
    source.write_text("import sys\nimport no_such_module_at_all\n")
    with pytest.raises(LookupError, match="no_such_module_at_all"):
        refuse_missing_imports(source)
    source.write_text("import sys\nsys.path.append('/elsewhere')\nimport no_such_module_at_all\n")
    refuse_missing_imports(source)


def test_a_function_that_a_manager_of_ones_own_calls_may_take_what_it_likes(composed, machine):
    path = machine.file("reward.py", "def compute_score(text):\n    return 1.0\n")
    reward = {"custom_reward_function": {"path": path, "name": "compute_score"}}
    config = OmegaConf.merge(composed, {"reward": reward})
    assert [each.verdict for each in matters(rewards_of_job(config, asked=False))] == ["wrong"]
    config = OmegaConf.merge(config, {"reward": {"reward_manager": {"name": "mine"}}})
    assert [each.verdict for each in matters(rewards_of_job(config, asked=False))] == ["not looked at"]


@pytest.mark.parametrize("source", [None, 3, ["openai/gsm8k"]], ids=str)
def test_a_data_source_that_is_no_text_has_no_score(source):
    assert scores_source("openai/gsm8k")
    assert not scores_source(source)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        (TOOL.format(second="b: another."), False),
        (TOOL.format(second="b (int): another."), True),
        (TOOL.replace("@function_tool\n", "@function_tool\n@checked\n"), False),
    ],
)
def test_a_tools_docstring_is_read_as_transformers_reads_it(text, is_told, composed, machine):
    multi_turn = {"function_tool_path": machine.file("tools.py", text)}
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}}})
    (found,) = tools_of_job(config)
    assert (found.verdict == "wrong") == is_told, found


def test_tools_that_are_no_list_are_told(composed, machine):
    path = machine.file("tools.yaml", "tools: nothing\n")
    multi_turn = {"tool_config_path": path}
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}}})
    (found,) = tools_of_job(config)
    assert "its key tools holds no list" in found.told
