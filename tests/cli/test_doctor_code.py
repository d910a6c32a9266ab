"""``verl-padding doctor`` on agent loops, rewards, tools and data sets of the user's own."""

import asyncio
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.support.jobs_for_doctor import (
    AGENT,
    LOOP,
    SCORED,
    Kind,
    Machine,
    Reasons,
    assert_told,
    assert_tried_and_well,
    contents_of,
    prompts,
    with_settings,
)
from verl_padding.doctor.finding import Finding
from verl_padding.doctor.named_objects import is_module, refuse_missing_object
from verl_padding.doctor.rewards import rewards_of_job

pytestmark = pytest.mark.usefixtures("no_ray_cluster")


FUNCTION = "reward.custom_reward_function.path"
WITHOUT_LOG_PROBS = SCORED.replace("            response_logprobs=[-1.0],\n", "")


def _tools(machine: Machine, kind: str = "native", schema: str = "") -> list[str]:
    tool = f"tools:\n- class_name: verl.tools.base_tool.BaseTool\n  config: {{type: {kind}}}\n{schema}"
    return [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={machine.file('tools.yaml', tool)}"]


def a_reward_of_other_arguments(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "def compute_score(text):\n    return 0.0\n")
    return [f"reward.custom_reward_function.path={path}"]


def a_reward_that_imports_what_is_not_there(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "import sympyy\ndef compute_score(**kwargs):\n    return 0.0\n")
    return [f"reward.custom_reward_function.path={path}"]


def no_reward_file(machine: Machine) -> list[str]:
    return ["reward.custom_reward_function.path=/nowhere/reward.py"]


def no_reward_function(machine: Machine) -> list[str]:
    return [f"reward.custom_reward_function.path={machine.file('reward.py', 'def reward(): ...')}"]


def no_such_agent_loop(machine: Machine) -> list[str]:
    return [f"{AGENT}.default_agent_loop=mine"]


def a_row_with_another_agent_loop(machine: Machine) -> list[str]:
    path = machine.folder / "agents.parquet"
    prompts(8, agent_name=["tool_agent", "mine"] * 4).to_parquet(path)
    return [f"data.train_files={path}"]


def no_agent_loop_file(machine: Machine) -> list[str]:
    return [f"{AGENT}.agent_loop_config_path=/nowhere/agent.yaml"]


def an_agent_loop_without_its_module(machine: Machine) -> list[str]:
    path = machine.file("agent.yaml", "- name: mine\n  _target_: no_such_package.agent.Mine\n")
    return [f"{AGENT}.agent_loop_config_path={path}", f"{AGENT}.default_agent_loop=mine"]


def no_tool(machine: Machine) -> list[str]:
    path = machine.file(
        "tools.yaml", "tools:\n  - class_name: verl.tools.base_tool.Hammer\n    config: {type: native}\n"
    )
    return [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}"]


def no_external_module(machine: Machine) -> list[str]:
    machine.patch.setenv("VERL_USE_EXTERNAL_MODULES", "json,my_modul")
    return []


def no_such_reward_manager(machine: Machine) -> list[str]:
    return ["reward.reward_manager.name=nope"]


def no_such_object_of_a_reward_manager(machine: Machine) -> list[str]:
    path = machine.file("manager.py", "class Mine: ...")
    return ["reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={path}"]


def an_external_module_that_fails(machine: Machine) -> list[str]:
    machine.file("broken_module.py", "raise ValueError('boom')")
    machine.patch.syspath_prepend(machine.folder)
    machine.patch.setenv("VERL_USE_EXTERNAL_MODULES", "broken_module")
    return []


def an_external_module_that_verl_imports_too_early(machine: Machine) -> list[str]:
    machine.file("early_module.py", "import verl\n\nverl.is_npu_available, verl._ep\n")
    machine.patch.syspath_prepend(machine.folder)
    machine.patch.setenv("VERL_USE_EXTERNAL_MODULES", "json,early_module")
    return []


def a_mapping_of_agent_loops(machine: Machine) -> list[str]:
    loops = machine.file("agent.yaml", "mine:\n  _target_: my_loops.Mine\n")
    return [f"{AGENT}.agent_loop_config_path={loops}"]


def _with_extra_info(machine: Machine, text: str = "", **keys: object) -> list[str]:
    data = machine.data(prompts(16, extra_info=[keys] * 16))
    path = machine.file(
        "rewards.py", f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n{text}"
    )
    return [*data, f"reward.custom_reward_function.path={path}"] if text else data


def a_reward_of_a_key_that_no_row_has(machine: Machine) -> list[str]:
    text = "    limit, turns = extra_info['limit'], extra_info['num_turns']\n    return float(limit > turns)\n"
    return _with_extra_info(machine, text, index=1, most=3)


def a_loop_of_a_key_that_no_row_has(machine: Machine) -> list[str]:
    tries = "        tries = int(kwargs['extra_info']['tries'])\n"
    return [*_with_extra_info(machine, index=1, max_tries=4), *machine.loop(LOOP + tries + SCORED)]


ASKS = """\
        return await self.ask(kwargs["raw_prompt"])

    async def ask(self, messages):
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = await self.server_manager.generate(request_id="1", prompt_ids=ids, sampling_params={})
"""
"""A loop that takes a mapping for token ids."""


def a_loop_of_mappings(machine: Machine) -> list[str]:
    return machine.loop(LOOP + ASKS + SCORED)


def an_argument_of_the_template_that_verl_gives(machine: Machine) -> list[str]:
    return ["+data.apply_chat_template_kwargs.add_generation_prompt=true"]


def an_argument_that_verl_gives_in_a_loop_of_ones_own(machine: Machine) -> list[str]:
    asks = "        while kwargs:\n            ids = await self.ct_build_initial_tokens(kwargs['raw_prompt'])\n"
    return ["+data.apply_chat_template_kwargs.tools=[]", *machine.loop(LOOP + asks + SCORED)]


def rewards_that_nobody_computes(machine: Machine) -> list[str]:
    data = machine.data(prompts(16).drop(columns=["reward_model", "data_source"]))
    return [*data, *machine.loop(LOOP + SCORED.replace(", reward_score=1.0", ""))]


def a_loop_that_does_not_run(machine: Machine) -> list[str]:
    return machine.loop(LOOP.replace("def run(", "def start(") + SCORED)


def a_loop_that_takes_no_more(machine: Machine) -> list[str]:
    return machine.loop(LOOP.replace("**kwargs", "raw_prompt") + SCORED)


def a_loop_that_is_not_awaited(machine: Machine) -> list[str]:
    return machine.loop(LOOP.replace("async def", "def") + "        made, outputs = 0, []\n        return outputs\n")


def a_loop_that_yields(machine: Machine) -> list[str]:
    return machine.loop(LOOP + SCORED.replace("return ", "yield "))


def outputs_without_turns(machine: Machine) -> list[str]:
    return machine.loop(LOOP + SCORED.replace("num_turns=2, ", ""))


def outputs_without_log_probs(machine: Machine) -> list[str]:
    return machine.loop(LOOP + WITHOUT_LOG_PROBS)


def outputs_without_log_probs_for_a_bypass(machine: Machine) -> list[str]:
    settings = ["actor_rollout_ref.rollout.calculate_log_probs=false", "algorithm.rollout_correction.bypass_mode=true"]
    return [*settings, *machine.loop(LOOP + WITHOUT_LOG_PROBS)]


def outputs_without_metrics(machine: Machine) -> list[str]:
    text = LOOP.replace("class Mine(AgentLoopBase)", "class Ours(AgentLoopBase): ...\n\nclass Mine(Ours)")
    return machine.loop(text + SCORED.replace("metrics={}, ", ""))


def outputs_of_no_known_step(machine: Machine) -> list[str]:
    return machine.loop(LOOP + SCORED.replace("extra_fields=", "multi_modal_data="))


def outputs_of_ones_own_fields(machine: Machine) -> list[str]:
    return machine.loop(LOOP + SCORED.replace('"min_global_steps": 1, "max_global_steps": 1', '"right": True'))


def a_loop_that_cannot_be_made(machine: Machine) -> list[str]:
    made = "    def __init__(self, tokenizer):\n        self.tokenizer = tokenizer\n"
    return machine.loop(LOOP.replace("    async", f"{made}    async") + SCORED)


def a_loop_that_looks_around(machine: Machine) -> list[str]:
    return machine.loop("from .rewards import score\n" + LOOP + SCORED)


def a_loop_that_is_misspelt(machine: Machine) -> list[str]:
    return [f"{AGENT}.default_agent_loop=singel_turn_agent"]


def a_reward_that_looks_around(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "from .sums import add\ndef compute_score(**kwargs):\n    return 0.0\n")
    return [f"reward.custom_reward_function.path={path}"]


def a_reward_that_is_none(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "def compute_score(**kwargs):\n    score = 1.0\n")
    return [f"reward.custom_reward_function.path={path}"]


def _reward(machine: Machine, *lines: str) -> list[str]:
    text = "\n".join(["def compute_score(**kwargs):", *(f"    {line}" for line in lines), ""])
    return [f"reward.custom_reward_function.path={machine.file('rewards.py', text)}"]


def a_reward_of_two(machine: Machine) -> list[str]:
    return _reward(machine, "if not kwargs:", "    return 0.0, {}", "return 1.0, {'right': True}")


def a_reward_of_text(machine: Machine) -> list[str]:
    return _reward(machine, "told = f'{1.0}'", "return told")


def a_reward_of_another_key(machine: Machine) -> list[str]:
    return _reward(machine, "return {'reward': 1.0} if kwargs else dict(right=True)")


def a_reward_that_needs_more(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "def compute_score(data_source, weight, **kwargs):\n    return weight\n")
    return [f"reward.custom_reward_function.path={path}"]


def a_reward_of_more_than_it_takes(machine: Machine) -> list[str]:
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    path = machine.file("rewards.py", text)
    return [
        f"reward.custom_reward_function.path={path}",
        "+reward.custom_reward_function.reward_kwargs.weight=2",
    ]


def a_reward_that_cannot_wait(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "async def compute_score(**kwargs):\n    return 0.0\n")
    return [f"reward.custom_reward_function.path={path}", "reward.reward_manager.name=remote"]


GROUPS = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
"""As DAPO's own recipe has it."""


def groups_by_what_no_reward_gives(machine: Machine) -> list[str]:
    return [
        *GROUPS,
        *_reward(machine, "if not kwargs:", "    return dict(score=0.0)", "return {'score': 1.0, 'ok': 1}"),
    ]


def rewards_of_no_worker(machine: Machine) -> list[str]:
    return ["reward.num_workers=0"]


def a_data_set_that_is_none(machine: Machine) -> list[str]:
    path = machine.file("mine.py", "class Mine:\n    def __getitem__(self, number): ...\n")
    return [f"data.custom_cls.path={path}", "data.custom_cls.name=Mine"]


def a_tool_of_no_type(machine: Machine) -> list[str]:
    return _tools(machine, kind="mcp")


def a_tool_with_half_a_schema(machine: Machine) -> list[str]:
    return _tools(machine, schema="  tool_schema: {type: function}\n")


def a_function_without_types(machine: Machine) -> list[str]:
    text = '@function_tool\ndef add(a, b):\n    """Adds.\n\n    Args:\n        a: one.\n        b: another.\n    """\n'
    path = machine.file("tools.py", "from verl.tools.function_tool import function_tool\n\n" + text)
    return [f"actor_rollout_ref.rollout.multi_turn.function_tool_path={path}"]


def tool_calls_in_no_format(machine: Machine) -> list[str]:
    return [f"{AGENT}.default_agent_loop=tool_agent", "actor_rollout_ref.rollout.multi_turn.format=hermess"]


CANNOT_START: Reasons = {
    no_reward_file: ("reward.custom_reward_function.path", "there is no such file"),
    no_reward_function: ("reward.custom_reward_function.path", "has no 'compute_score'"),
    no_such_agent_loop: (f"{AGENT}.default_agent_loop", "mine: no agent loop of this name"),
    a_row_with_another_agent_loop: ("data.train_files", "its column agent_name names mine. Choices: "),
    no_agent_loop_file: (f"{AGENT}.agent_loop_config_path", "there is no such file"),
    an_agent_loop_without_its_module: (
        f"{AGENT}.agent_loop_config_path",
        "_target_: no_such_package.agent.Mine: there is no module 'no_such_package' on Python's path",
    ),
    no_tool: ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "has no 'Hammer'"),
    no_external_module: ("VERL_USE_EXTERNAL_MODULES", "json,my_modul: there is no module 'my_modul' here"),
    a_reward_of_other_arguments: (
        "reward.custom_reward_function.path",
        "compute_score() takes no argument 'data_source': it is called with data_source, solution_str, ground_truth",
    ),
    a_reward_that_imports_what_is_not_there: (
        "reward.custom_reward_function.path",
        "imports 'sympyy', and there is no such module on Python's path",
    ),
    no_such_reward_manager: ("reward.reward_manager.name", "nope: no reward manager of this name. Choices: "),
    no_such_object_of_a_reward_manager: ("reward.reward_manager.name", "has no 'naive'"),
    an_external_module_that_fails: (
        "VERL_USE_EXTERNAL_MODULES",
        "importing 'broken_module' ends with ValueError: boom",
    ),
    an_external_module_that_verl_imports_too_early: (
        "VERL_USE_EXTERNAL_MODULES",
        "json,early_module: verl imports them before the plug-in and most of itself, and there that ends with "
        "AttributeError: partially initialized module 'verl'",
    ),
    a_mapping_of_agent_loops: (
        f"{AGENT}.agent_loop_config_path",
        "it holds no list. Write each loop as an entry with name and _target_, behind a -",
    ),
    rewards_that_nobody_computes: (
        "data.train_files",
        "has no column 'data_source', which verl's reward managers read",
    ),
    a_reward_of_a_key_that_no_row_has: (
        "reward.custom_reward_function.path",
        "rewards.py: compute_score() reads extra_info['limit'], and the rows of data.train_files have no such key",
    ),
    a_loop_of_a_key_that_no_row_has: (f"{AGENT}.agent_loop_config_path", "Mine: run() reads extra_info['tries'], and"),
    a_loop_of_mappings: (f"{AGENT}.agent_loop_config_path", "line 9: what apply_chat_template returns is a mapping"),
    an_argument_of_the_template_that_verl_gives: (
        "data.apply_chat_template_kwargs.add_generation_prompt",
        "True: verl gives the chat template add_generation_prompt itself, and every session of the agent loop",
    ),
    an_argument_that_verl_gives_in_a_loop_of_ones_own: (
        "data.apply_chat_template_kwargs.tools",
        "[]: verl gives the chat template tools itself, and every session of the agent loop 'mine' fails",
    ),
    a_loop_that_does_not_run: (f"{AGENT}.agent_loop_config_path", "Mine has no method 'run', which verl awaits"),
    a_loop_that_takes_no_more: (f"{AGENT}.agent_loop_config_path", "run() takes no argument 'index'"),
    a_loop_that_is_not_awaited: (f"{AGENT}.agent_loop_config_path", "Mine.run is no async function, and verl awaits"),
    a_loop_that_yields: (f"{AGENT}.agent_loop_config_path", "Mine.run has a yield, and verl awaits what it returns"),
    outputs_without_log_probs: (f"{AGENT}.agent_loop_config_path", "without response_logprobs, and a step ends"),
    outputs_without_log_probs_for_a_bypass: (
        f"{AGENT}.agent_loop_config_path",
        "without response_logprobs, and a step ends",
    ),
    outputs_without_turns: (f"{AGENT}.agent_loop_config_path", "a step ends for want of it. Add num_turns=2."),
    outputs_without_metrics: (f"{AGENT}.agent_loop_config_path", "a step ends for want of it. Add metrics={}."),
    outputs_of_no_known_step: (f"{AGENT}.agent_loop_config_path", "a step ends for want of it. Add extra_fields="),
    outputs_of_ones_own_fields: (f"{AGENT}.agent_loop_config_path", "a step ends for want of it. Add extra_fields="),
    a_loop_that_cannot_be_made: (f"{AGENT}.agent_loop_config_path", "__init__() takes no argument 'trainer_config'"),
    a_loop_that_looks_around: (
        f"{AGENT}.agent_loop_config_path",
        "imports '.rewards', which needs a package around it",
    ),
    a_loop_that_is_misspelt: (
        f"{AGENT}.default_agent_loop",
        "singel_turn_agent: no agent loop of this name. Did you mean single_turn_agent? Choices: ",
    ),
    a_reward_that_looks_around: (
        "reward.custom_reward_function.path",
        "imports '.sums', which needs a package around it",
    ),
    a_reward_that_is_none: (
        "reward.custom_reward_function.path",
        "compute_score() returns nothing, and a score is needed",
    ),
    a_reward_of_two: ("reward.custom_reward_function.path", "compute_score() returns a tuple, and verl takes a number"),
    a_reward_of_text: ("reward.custom_reward_function.path", "compute_score() returns a text, and verl takes a number"),
    a_reward_of_another_key: (
        "reward.custom_reward_function.path",
        "returns a mapping of reward, a mapping of right, and verl takes a number, or a mapping with 'score'",
    ),
    a_reward_that_needs_more: (
        "reward.custom_reward_function.path",
        "compute_score() needs an argument 'weight', which nobody gives it",
    ),
    a_reward_of_more_than_it_takes: (
        "reward.custom_reward_function.path",
        "compute_score() takes no argument 'weight'",
    ),
    a_reward_that_cannot_wait: (
        "reward.custom_reward_function.path",
        "is an async function, which verl's reward manager 'remote' does not take",
    ),
    groups_by_what_no_reward_gives: (
        "algorithm.filter_groups.metric",
        "acc: the reward function compute_score() leaves no such value with a row, only ok, score. Choose one of",
    ),
    rewards_of_no_worker: ("reward.num_workers", "0: nobody is left to compute the rewards"),
    a_data_set_that_is_none: ("data.custom_cls.path", "Mine is no torch.utils.data.Dataset"),
    a_tool_of_no_type: ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "config.type is mcp, but verl has"),
    a_tool_with_half_a_schema: (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "tool_schema.function is no schema of a tool (Field required)",
    ),
    a_function_without_types: (
        "actor_rollout_ref.rollout.multi_turn.function_tool_path",
        "add(): its argument 'a' has no type",
    ),
    tool_calls_in_no_format: ("actor_rollout_ref.rollout.multi_turn.format", "hermess: verl reads tool calls in no"),
}
"""Why a job cannot start, or cannot end its first step -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(reason, composed, machine):
    assert_told(contents_of(composed, reason(machine)), *CANNOT_START[reason])


def plain_texts_for_a_loop_of_ones_own(machine: Machine) -> list[str]:
    return [*machine.data(prompts(16, prompt=["1+1"] * 16)), *machine.loop(LOOP + SCORED)]


def no_truth_where_the_loop_scores(machine: Machine) -> list[str]:
    return [*machine.data(prompts(16)[["prompt"]]), *machine.loop(LOOP + SCORED)]


def no_truth_where_the_loop_may_score(machine: Machine) -> list[str]:
    text = LOOP.replace("import AgentLoopBase", "import AgentLoopBase as Base").replace("AgentLoopBase)", "Base)")
    return [*machine.data(prompts(16)[["prompt"]]), *machine.loop(text + "        return await episode(**kwargs)\n")]


def a_loop_that_extends_verls(machine: Machine) -> list[str]:
    text = "from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop\n"
    return machine.loop(f"{text}\nclass Mine(SingleTurnAgentLoop):\n    greeting = 'hi'\n")


def a_loop_for_each_prompt(machine: Machine) -> list[str]:
    data = prompts(16, agent_name=["mine"] * 16).drop(columns=["reward_model"])
    overrides = machine.loop(LOOP + SCORED)
    return [*machine.data(data), f"data.val_files={machine.folder}/data.parquet", overrides[0]]


def a_default_loop_that_no_prompt_takes(machine: Machine) -> list[str]:
    data = prompts(16, agent_name=["mine"] * 16)
    return [
        *machine.data(data),
        f"data.val_files={machine.folder}/data.parquet",
        machine.loop(LOOP + SCORED)[0],
        f"{AGENT}.default_agent_loop=nobodys",
    ]


def a_reward_that_waits(machine: Machine) -> list[str]:
    text = "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, k=1):\n    return k\n"
    return [
        *machine.data(prompts(16, data_source=["sums"] * 16)),
        f"data.val_files={machine.folder}/data.parquet",
        f"reward.custom_reward_function.path={machine.file('rewards.py', text)}",
        "+reward.custom_reward_function.reward_kwargs.k=2",
    ]


def a_package_that_imports_its_own(machine: Machine) -> list[str]:
    package = machine.folder / "my_rewards_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").touch()
    (package / "rewards.py").write_text("from .sums import add\n\ndef compute_score(**given):\n    return add(given)\n")
    machine.patch.syspath_prepend(machine.folder)
    return ["reward.custom_reward_function.path=pkg://my_rewards_package.rewards"]


def a_reward_that_a_function_makes(machine: Machine) -> list[str]:
    make = "def make():\n    global compute_score\n    compute_score = lambda **kwargs: 1.0\n\nmake()\n"
    return [f"{FUNCTION}={machine.file('rewards.py', make)}"]


def a_tool_of_verls(machine: Machine) -> list[str]:
    schema = "{type: function, function: {name: add, description: adds, parameters: {type: object, properties: {}}}}"
    text = '@function_tool(schema=ADD)\ndef add(a, b): ...\n\n@function_tool\ndef now() -> str:\n    """The time."""\n'
    path = machine.file("tools.py", "from verl.tools.function_tool import function_tool\n\n" + text)
    return [
        *_tools(machine, schema=f"  tool_schema: {schema}\n"),
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={path}",
        f"{AGENT}.default_agent_loop=tool_agent",
    ]


def loops_with_rewards_of_their_own(machine: Machine) -> list[str]:
    return [*machine.loop(LOOP + SCORED), "reward.num_workers=0"]


def a_loop_that_leaves_awaiting_to_verl(machine: Machine) -> list[str]:
    text = LOOP.replace("async def", "def") + "        begun = self.play(**kwargs)\n        return begun\n"
    return machine.loop(f"{text}\n    async def play(self, **kwargs):\n{SCORED}")


def outputs_without_log_probs_that_nobody_reads(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.calculate_log_probs=false", *machine.loop(LOOP + WITHOUT_LOG_PROBS)]


def outputs_that_get_their_turns_later(machine: Machine) -> list[str]:
    made = SCORED.replace("num_turns=2, ", "").replace("return ", "made = ")
    return machine.loop(f"{LOOP}{made}        made.num_turns = 3\n        return made\n")


def outputs_made_of_a_mapping(machine: Machine) -> list[str]:
    return machine.loop(LOOP + "        return AgentLoopOutput(**self.output())\n")


def outputs_of_a_class_of_ones_own(machine: Machine) -> list[str]:
    text = LOOP.replace("class Mine", "class AgentLoopOutput(AgentLoopOutput):\n    num_turns: int\n\nclass Mine")
    return machine.loop(text + SCORED.replace("num_turns=2, ", ""))


def a_reward_that_is_put_into_a_mapping(machine: Machine) -> list[str]:
    return _reward(machine, "found = {'right': True}", "found['score'] = 1.0", "return found")


RIGHT: dict[str, list[str]] = {
    "set by a function inside": [
        *("score = None", "def judge():", "    nonlocal score", "    score = 1.0", "judge()", "return score"),
    ],
    "set by a class inside": ["score = None", "class Judge:", "    nonlocal score", "    score = 1.0", "return score"],
    "set by a match": ["score = None", "match len(kwargs):", "    case int() as score: pass", "return score"],
    "set by a sequence": ["score = None", "match [*kwargs]:", "    case [*score]: score = 1.0", "return score"],
    "set by a mapping": ["last = None", "match {'score': 1.0}:", "    case {**last}: pass", "return last"],
    "set by an error": ["score = None", "try: 1 / 0", "except ZeroDivisionError as score: return 0.0", "return score"],
    "set at the top of the file": ["global score", "score = None", "judge()", "return score"],
    "set by an import": ["pi = None", "from math import pi", "return pi"],
    "set in an expression": ["score = None", "print(score := 1.0)", "return score"],
    "set where a default is": ["score = None", "def told(at=(score := 1.0)): ...", "return score"],
    "set by with": ["score = None", "with numbers() as score: pass", "return score"],
    "set by a loop": ["score = None", "for score in (0.0, 1.0): pass", "return score"],
    "set by what a star leaves": ["*rest, score = None, None, 1.0", "return score"],
    "set in both branches": ["score = None", "if kwargs: score = 1.0", "else: score = 0.0", "return score"],
    "set or left": ["score = None", "if kwargs: score = 1.0", "else: raise ValueError", "return score"],
    "set by a try": ["score = None", "try: score = 1.0", "except ValueError: score = 0.0", "return score"],
    "set at last": ["score = None", "try: judge()", "finally: score = 0.0", "return score"],
    "set by every case": [
        *("score = None", "match kwargs:", "    case {}: score = 1.0", "    case _: score = 0.0", "return score"),
    ],
    "set before a break": [
        *("score = None", "for word in kwargs:", "    if word:", "        score = 1.0", "        break"),
        *("else: score = 0.0", "return score"),
    ],
    "asked for": ["score = None", "if kwargs: score = 1.0", "if score is None: score = 0.0", "return score"],
    "asked for where it is returned": [
        *("score = None", "if kwargs: score = 1.0", "return 0.0 if score is None else score"),
    ],
    "set after it is returned": ["score = 1.0", "if kwargs: return score", "score = 'no'", "raise ValueError(score)"],
}
"""Bodies of right reward functions, which have a name that is None, or a text, in some other place."""


def groups_by_a_number_alone(machine: Machine) -> list[str]:
    return [*GROUPS, *_reward(machine, "return -1.0 if not kwargs else float(len(kwargs) > 3)")]


def groups_by_what_a_reward_may_give(machine: Machine) -> list[str]:
    return [*GROUPS, *_reward(machine, "return {'score': 1.0, 'ok': 1} if kwargs else score(kwargs)")]


def groups_by_the_reward_itself(machine: Machine) -> list[str]:
    return [GROUPS[0], "algorithm.filter_groups.metric=reward", *_reward(machine, "return {'score': 1.0, 'ok': 1}")]


def a_reward_of_more_keys(machine: Machine) -> list[str]:
    return _reward(machine, "return {'right': True, **score(kwargs)} if kwargs else {'score': 0}")


def a_reward_of_keys_that_may_be_there(machine: Machine) -> list[str]:
    text = """\
    first, turns = extra_info["index"], extra_info["num_turns"]
    limit = extra_info["limit"] if "limit" in extra_info else 3
    if turns:
        return extra_info["tries"]
    return extra_info["later"]
"""
    return _with_extra_info(machine, text, index=1)


def a_reward_that_adds_keys(machine: Machine) -> list[str]:
    return _with_extra_info(machine, "    prepare(extra_info)\n    return extra_info['ready']\n", index=1)


def a_reward_of_keys_that_the_loop_may_add(machine: Machine) -> list[str]:
    made = SCORED.replace("reward_score=1.0,", "").replace('"min_global_steps"', '"right": 1, "min_global_steps"')
    overrides = _with_extra_info(machine, "    return extra_info['right']\n", index=1)
    return [*overrides, *machine.loop(LOOP + made)]


def a_reward_of_keys_of_a_table(machine: Machine) -> list[str]:
    text = "    from tables import EASY as extra_info\n    return extra_info['limit']\n"
    return _with_extra_info(machine, text, index=1)


def a_loop_that_takes_the_ids_out(machine: Machine) -> list[str]:
    takes_out = "        match ids:\n            case {'input_ids': ids}: ...\n        answer ="
    return machine.loop(LOOP + ASKS.replace("        answer =", takes_out) + SCORED)


def a_loop_of_keys_that_it_sets(machine: Machine) -> list[str]:
    sets = "        kwargs['extra_info']['tries'] = 1\n        tries = kwargs['extra_info']['tries']\n"
    return [*_with_extra_info(machine, index=1), *machine.loop(LOOP + sets + SCORED)]


def a_loop_of_lists(machine: Machine) -> list[str]:
    return machine.loop(LOOP + ASKS.replace("prompt=True)", "prompt=True, return_dict=False)") + SCORED)


def an_argument_of_the_template_that_nobody_gives_twice(machine: Machine) -> list[str]:
    template = "data.apply_chat_template_kwargs"
    return [
        f"+{template}.add_generation_prompt=true",
        f"+{template}.enable_thinking=false",
        *machine.loop(LOOP + SCORED),
    ]


LEGAL: list[Kind] = [
    a_reward_of_keys_that_may_be_there,
    a_reward_that_adds_keys,
    a_reward_of_keys_of_a_table,
    a_loop_that_takes_the_ids_out,
    a_reward_of_keys_that_the_loop_may_add,
    a_loop_of_keys_that_it_sets,
    a_loop_of_lists,
    an_argument_of_the_template_that_nobody_gives_twice,
    a_loop_that_leaves_awaiting_to_verl,
    outputs_without_log_probs_that_nobody_reads,
    outputs_that_get_their_turns_later,
    outputs_made_of_a_mapping,
    outputs_of_a_class_of_ones_own,
    a_reward_that_is_put_into_a_mapping,
    groups_by_a_number_alone,
    groups_by_what_a_reward_may_give,
    groups_by_the_reward_itself,
    a_reward_of_more_keys,
    plain_texts_for_a_loop_of_ones_own,
    no_truth_where_the_loop_scores,
    no_truth_where_the_loop_may_score,
    a_loop_that_extends_verls,
    a_loop_for_each_prompt,
    a_default_loop_that_no_prompt_takes,
    a_reward_that_waits,
    a_package_that_imports_its_own,
    a_reward_that_a_function_makes,
    a_tool_of_verls,
    loops_with_rewards_of_their_own,
]


def test_the_loop_of_the_legal_jobs_gives_a_row_what_verls_trainer_reads_by_default(composed):
    assert composed.actor_rollout_ref.rollout.calculate_log_probs
    module = {}
    exec(LOOP + SCORED, module)
    row = asyncio.run(module["Mine"].run(None, {})).as_dict()
    assert len(row["rollout_log_probs"]) == len(row["responses"]) > 0
    assert row["extra_fields"]["min_global_steps"] == row["extra_fields"]["max_global_steps"] == 1


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_job_of_a_rare_kind_is_not_called_wrong(kind, composed, machine):
    assert_tried_and_well(contents_of(composed, kind(machine)))


def a_loop_that_no_prompt_takes(machine: Machine) -> list[str]:
    overrides = machine.loop(LOOP.replace("class Mine", "class Ours") + f"{SCORED}\nclass Mine(Ours): ...\n")
    module = f"loops_of_{machine.folder.name}"
    others = f"- name: base\n  _target_: {module}.Base\n- name: gone\n  _target_: {module}.Gone\n"
    machine.file(f"{module}.py", (machine.folder / f"{module}.py").read_text() + "\nclass Base: ...\n")
    machine.file("agent.yaml", (machine.folder / "agent.yaml").read_text() + others)
    return overrides


def outputs_of_which_one_lacks_its_turns(machine: Machine) -> list[str]:
    lacking = SCORED.replace("num_turns=2, ", "").replace("return", "if not kwargs: return")
    return machine.loop(LOOP + lacking + SCORED)


def a_reward_that_is_sometimes_none(machine: Machine) -> list[str]:
    return _reward(machine, "if not kwargs:", "    return None", "return 1.0")


def a_loop_that_may_give_mappings(machine: Machine) -> list[str]:
    return machine.loop(LOOP + ASKS.replace("return await", "if kwargs: return await") + SCORED)


UNLIKELY: dict[Kind, tuple[str, ...]] = {
    a_loop_that_no_prompt_takes: ("No prompt is known to name 'base'", "No prompt is known to name 'gone'"),
    outputs_of_which_one_lacks_its_turns: ("in some place without num_turns; a step with it ends. Add num_turns=2.",),
    a_loop_that_may_give_mappings: ("line 9: a session that comes here ends, since apply_chat_template returns a",),
    a_reward_that_is_sometimes_none: ("in some place compute_score() returns None, of which verl makes no score",),
}
"""What a job may get through its first step with -> parts of what is said."""


@pytest.mark.parametrize("kind", UNLIKELY, ids=lambda kind: kind.__name__)
def test_what_only_some_session_may_meet_is_a_warning(kind, composed, machine):
    left = [each for each in contents_of(composed, kind(machine)) if each.verdict != "ok"]
    assert [each.verdict for each in left] == ["warning"] * len(UNLIKELY[kind]), left
    assert all(told in each.told for each, told in zip(left, UNLIKELY[kind], strict=True)), left


def _of_function(composed: DictConfig, overrides: list[str]) -> Finding:
    found = rewards_of_job(with_settings(composed, overrides), asked=True)
    return next(each for each in found if each.subject == FUNCTION)


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT.keys())
def test_a_reward_that_is_set_in_some_other_way_than_by_an_equals_sign_is_not_called_wrong(lines, composed, machine):
    found = _of_function(composed, _reward(machine, *lines))
    assert found.verdict == "ok", found


WRONG: dict[str, tuple[str, list[str]]] = {
    "never set again": ("wrong", ["score = None", "return score"]),
    "set in a function inside, which has it for itself": (
        "wrong",
        ["score = None", "def judge():", "    score = 1.0", "return score"],
    ),
    "set too late": ("wrong", ["score = 1.0", "score = None", "return score"]),
    "set in one branch": ("warning", ["score = None", "if kwargs: score = 1.0", "return score"]),
    "set where it may fail": (
        "warning",
        ["score = None", "try: score = 1.0", "except ValueError: pass", "return score"],
    ),
    "set where an error may be passed over": (
        "warning",
        ["score = None", "with passing():", "    score = 1.0", "return score"],
    ),
    "set in some cases": (
        "warning",
        ["score = None", "match kwargs:", "    case {'a': 1}: score = 1.0", "return score"],
    ),
    "not set before each break": (
        "warning",
        [
            *("score = None", "for word in kwargs:", "    if word: break", "    if not word:", "        score = 1.0"),
            *("        break", "else: score = 0.0", "return score"),
        ],
    ),
    "returned before it is set": (
        "warning",
        ["score = None", "if kwargs: return score", "score = 1.0", "return score"],
    ),
}
"""Bodies of reward functions that return None, and what the doctor says."""


@pytest.mark.parametrize(("verdict", "lines"), WRONG.values(), ids=WRONG.keys())
def test_a_reward_that_is_none_is_told_however_it_is_set(verdict, lines, composed, machine):
    found = _of_function(composed, _reward(machine, *lines))
    assert found.verdict == verdict, found
    assert "compute_score() returns None" in found.told


def a_manager_of_loops_of_ones_own(machine: Machine) -> list[str]:
    machine.loop("class Manager: ...\n")
    return [
        *machine.data(prompts(16, responses=["2"] * 16)),
        f"{AGENT}.agent_loop_manager_class=loops_of_{machine.folder.name}.Manager",
    ]


def a_module_that_may_register_anything(machine: Machine) -> list[str]:
    machine.loop("")
    return [
        f"actor_rollout_ref.model.external_lib=loops_of_{machine.folder.name}",
        "actor_rollout_ref.rollout.multi_turn.format=mine",
        *machine.data(prompts(16, agent_name=["tool_agent"] * 8 + ["mine"] * 8)),
    ]


UNKNOWN: list[Kind] = [a_manager_of_loops_of_ones_own, a_module_that_may_register_anything]


@pytest.mark.parametrize("kind", UNKNOWN, ids=lambda kind: kind.__name__)
def test_what_cannot_be_known_is_not_called_wrong(kind, composed, machine):
    found = contents_of(composed, kind(machine))
    assert {finding.verdict for finding in found} == {"ok", "not looked at"}, found


def test_code_of_the_users_is_not_run_though_the_model_and_the_prompts_are_read(composed, machine):
    ends = "raise SystemExit('run')\n"
    (machine.folder / "data.py").write_text("from verl.utils.dataset.rl_dataset import RLHFDataset as Mine\n" + ends)
    (machine.folder / "tools.py").write_text(ends)
    overrides = [
        *machine.loop(LOOP + SCORED + ends),
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={machine.folder / 'tools.py'}",
    ]
    found = contents_of(composed, overrides)
    assert {each.verdict for each in found} == {"ok"}, found
    own = [f"data.custom_cls.path={machine.folder / 'data.py'}", "data.custom_cls.name=Mine"]
    left = [each for each in contents_of(composed, [*overrides, *own]) if each.verdict != "ok"]
    assert [(each.subject, each.verdict) for each in left] == [("data.custom_cls.path", "not looked at")]


def test_a_module_of_a_package_that_is_installed_elsewhere_is_found():
    import verl_padding.recipes

    assert Path(verl_padding.__file__).parent not in Path(verl_padding.recipes.__file__).parents
    assert is_module("verl_padding.recipes.every_call.agent_loop")
    assert not is_module("verl_padding.recipes.every_call.nothing")


def test_a_name_that_a_module_only_uses_is_not_one_that_it_has(tmp_path):
    source = tmp_path / "rewards.py"
    source.write_text("from math import inf\nwith open('x') as file:\n    print(compute_score)\n")
    for name in ("inf", "file"):
        refuse_missing_object(str(source), name)
    with pytest.raises(LookupError, match="has no 'compute_score'"):
        refuse_missing_object(str(source), "compute_score")
