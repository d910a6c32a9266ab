"""``verl-padding doctor`` on environment variables, of the shell and of the job's config, and on Ray's sizes."""

import os

import pytest
from omegaconf import open_dict

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
    matters,
    with_settings,
)
from verl_padding.doctor.environment import ENV_VARS, LEVEL, variables_of_job, variables_of_shell
from verl_padding.doctor.interfaces import interfaces_of_job
from verl_padding.doctor.own_files import variables_needed

RAY = "ray_kwargs.ray_init"
FUNCTION = "reward.custom_reward_function.path"
SCORE = "def compute_score(**kwargs):\n    return 1.0\n"

pytestmark = pytest.mark.usefixtures("no_ray_cluster")


def _reward(machine: Machine, text: str) -> list[str]:
    return [f"{FUNCTION}={machine.file('rewards.py', text + SCORE)}"]


def no_such_interface(machine: Machine) -> list[str]:
    machine.patch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    return []


def no_such_interface_for_the_workers(machine: Machine) -> list[str]:
    return [f"+{ENV_VARS}.GLOO_SOCKET_IFNAME=lo,ib0"]


def a_store_in_megabytes(machine: Machine) -> list[str]:
    return [f"{RAY}.object_store_memory=4096"]


def a_store_larger_than_the_machine(machine: Machine) -> list[str]:
    return [f"{RAY}.object_store_memory={10**15}"]


def a_share_of_memory_in_percent(machine: Machine) -> list[str]:
    machine.patch.setenv("RAY_memory_usage_threshold", "95")
    return []


def a_variable_for_workers_that_ray_cannot_read(machine: Machine) -> list[str]:
    return [f"+{ENV_VARS}.RAY_memory_usage_threshold=most"]


def a_level_for_workers_that_there_is_not(machine: Machine) -> list[str]:
    return [f"+{ENV_VARS}.VERL_LOGGING_LEVEL=debug"]


def a_reward_that_reads_a_variable(machine: Machine) -> list[str]:
    return _reward(machine, 'import os\n\nJUDGE = os.environ["JUDGE_URL"]\n')


def a_loop_that_reads_a_variable(machine: Machine) -> list[str]:
    return machine.loop(
        LOOP.replace("class Mine", "from os import environ\nURL = f\"http://{environ['HOST']}\"\n\n\nclass Mine")
        + SCORED
    )


CANNOT_START: Reasons = {
    no_such_interface: ("GLOO_SOCKET_IFNAME", "ib0: there is no network interface ib0; this machine has lo"),
    no_such_interface_for_the_workers: ("GLOO_SOCKET_IFNAME", "lo,ib0: there is no network interface ib0"),
    a_store_in_megabytes: (f"{RAY}.object_store_memory", "4096: Ray makes no such store of objects (ValueError: "),
    a_store_larger_than_the_machine: (f"{RAY}.object_store_memory", "Give bytes, or leave it out"),
    a_share_of_memory_in_percent: ("RAY_memory_usage_threshold", "95: Ray's node ends with it as it starts. Set it"),
    a_variable_for_workers_that_ray_cannot_read: (
        f"{ENV_VARS}.RAY_memory_usage_threshold",
        "most: importing Ray ends with it (",
    ),
    a_level_for_workers_that_there_is_not: (f"{ENV_VARS}.VERL_LOGGING_LEVEL", "Set it to DEBUG."),
}
"""Why a job cannot start -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_variable_that_is_why(reason, composed, machine):
    assert_told(contents_of(composed, reason(machine)), *CANNOT_START[reason])


READS: Reasons = {
    a_reward_that_reads_a_variable: (FUNCTION, "rewards.py, line 3: reads os.environ['JUDGE_URL'] as it is loaded"),
    a_loop_that_reads_a_variable: (f"{AGENT}.agent_loop_config_path", "reads os.environ['HOST'] as it is loaded"),
}


@pytest.mark.parametrize("kind", READS, ids=lambda kind: kind.__name__)
def test_variables_that_own_code_reads_and_that_are_not_set_here_are_a_warning(kind, composed, machine):
    found = contents_of(composed, kind(machine))
    setting, told = READS[kind]
    assert [each for each in found if (each.subject, each.verdict) == (setting, "warning") and told in each.told], found
    assert not [each for each in found if each.verdict == "wrong"]


@pytest.mark.parametrize("level", [None, "INFO", "WARN"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_line_of_verls_log_ends_a_stock_job_that_writes_it(padded, level, composed, machine):
    overrides = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=false"]
    config = with_settings(composed, overrides)
    if level is None:
        machine.patch.delenv(LEVEL, raising=False)
    else:
        machine.patch.setenv(LEVEL, level)
    if not padded:
        with open_dict(config):
            del config.padding
    told = [each for each in variables_of_job(config) if each.subject == LEVEL]
    assert [each.verdict for each in told] == (["wrong"] if not padded and level != "WARN" else [])
    assert all("INFO: with actor_rollout_ref.hybrid_engine=False" in each.told for each in told)


def an_interface_that_is_here(machine: Machine) -> list[str]:
    machine.patch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    machine.patch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # which nobody reads on a CPU
    return [f"+{ENV_VARS}.GLOO_SOCKET_IFNAME=lo:1"]


def the_smallest_store(machine: Machine) -> list[str]:
    return [f"{RAY}.object_store_memory={75 * 2**20}"]


def shares_and_flags_of_ray(machine: Machine) -> list[str]:
    machine.patch.setenv("RAY_memory_usage_threshold", "1.0")
    machine.patch.setenv("RAY_memory_monitor_refresh_ms", "0")
    machine.patch.setenv("VERL_LOGGING_LEVEL", "DEBUG")
    return []


def a_variable_that_the_config_sets(machine: Machine) -> list[str]:
    return [*a_reward_that_reads_a_variable(machine), f"+{ENV_VARS}.JUDGE_URL=http://judge"]


def a_variable_that_is_read_only_if_it_is_there(machine: Machine) -> list[str]:
    lines = [
        "import os",
        "JUDGE = os.environ['JUDGE_URL'] if 'JUDGE_URL' in os.environ else ''",
        "if JUDGE:",
        "    KEY = os.environ['JUDGE_KEY']",
        "try:",
        "    NAME = os.environ['JUDGE_NAME']",
        "except KeyError:",
        "    NAME = None",
        "",
        "def judge():",
        "    return os.environ['JUDGE_MODEL']",
        "",
    ]
    return _reward(machine, "\n".join(lines))


def a_cluster_of_its_own_for_all_that_the_environment_says(machine: Machine) -> list[str]:
    machine.patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return ["+ray_kwargs.ray_init.address=local"]


LEGAL: list[Kind] = [
    a_cluster_of_its_own_for_all_that_the_environment_says,
    an_interface_that_is_here,
    the_smallest_store,
    shares_and_flags_of_ray,
    a_variable_that_the_config_sets,
    a_variable_that_is_read_only_if_it_is_there,
]


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_job_of_a_rare_kind_is_not_called_wrong(kind, composed, machine):
    assert_tried_and_well(contents_of(composed, kind(machine)))


@pytest.mark.parametrize(
    ("before", "needed"),
    [
        ("", ["KEY"]),
        ("import logging\nlogging.basicConfig()\nlogger = logging.getLogger(__name__)\n", ["KEY"]),
        ("import numpy\nfrom torch import nn\n", ["KEY"]),
        ("os.environ['KEY'] = '1'\n", []),
        ("os.environ.setdefault('KEY', '1')\n", []),
        ("from dotenv import load_dotenv\nload_dotenv()\n", []),
        ("import my_settings_of_all_jobs\n", []),
        ("try:\n    import my_settings_of_all_jobs\nexcept ImportError:\n    pass\n", []),
        ("import importlib\nimportlib.import_module('my_settings')\n", []),
        ("variables = os.environ\nvariables['KEY'] = '1'\n", []),
        ("assert 'PATH' in os.environ, os.environ['WHY']\n", ["KEY"]),
        ("AFTER = 1 < 2 < int(os.environ['LAST'])\n", ["KEY"]),
        ("if 'KEY' not in os.environ:\n    os.environ['KEY'] = '1'\n", []),
    ],
)
def test_what_may_have_set_a_variable_before_it_is_read_is_let_pass(before, needed, machine):
    file = machine.folder / "rewards.py"
    file.write_text(f"import os\n{before}KEY = os.environ['KEY']\n")
    assert [name for _, name in variables_needed(file)] == needed


def test_variables_with_which_verl_or_ray_cannot_be_imported_are_named_and_then_left_out(monkeypatch):
    refused = {"VERL_LOGGING_LEVEL": "debug", "RAY_memory_usage_threshold": "most", "RAY_NUM_REDIS_GET_RETRIES": "x"}
    for name, value in refused.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_CGRAPH_get_timeout", "11")
    found = {each.subject: each for each in variables_of_shell()}
    assert {name: each.verdict for name, each in found.items()} == dict.fromkeys(refused, "wrong")
    assert "importing verl ends with an error. Set it to DEBUG." in found["VERL_LOGGING_LEVEL"].told
    assert "invalid literal for int" in found["RAY_NUM_REDIS_GET_RETRIES"].told
    assert not refused.keys() & os.environ.keys()
    assert not list(variables_of_shell())


def test_quotes_within_a_value_are_told_where_it_is_a_number_or_a_name(composed, machine):
    machine.patch.setenv("VERL_USE_MODELSCOPE", '"True"')
    machine.patch.setenv("MY_TEXT", '"True"')
    (found,) = variables_of_shell()
    assert (found.subject, found.verdict) == ("VERL_USE_MODELSCOPE", "warning")
    assert found.told.endswith("nobody takes them off. Set it to True.")
    found = contents_of(composed, [f"+{ENV_VARS}.TOKENIZERS_PARALLELISM=\"'False'\""])
    (quoted,) = [each for each in found if each.subject == f"{ENV_VARS}.TOKENIZERS_PARALLELISM"]
    assert quoted.verdict == "warning"


@pytest.mark.parametrize(
    ("named", "is_there"),
    [
        ("lo", True),
        ("ib", False),
        ("ib,l", True),
        ("=l", False),
        ("=lo:0", True),
        ("^ib", True),
        ("^l,e", False),
        ("^=l", True),
    ],
)
def test_interfaces_for_nccl_are_read_as_it_reads_them(named, is_there, composed, monkeypatch):
    config = composed.copy()
    config.trainer.device = "cuda"
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    (found,) = interfaces_of_job(config)
    assert (found.subject, found.verdict) == ("NCCL_SOCKET_IFNAME", "ok" if is_there else "wrong")


def test_of_a_cluster_elsewhere_neither_interfaces_nor_variables_are_known(composed, machine):
    machine.patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    machine.patch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    machine.patch.setenv("RAY_memory_usage_threshold", "95")
    assert [each.verdict for each in interfaces_of_job(composed)] == ["not looked at"]
    assert not list(variables_of_job(composed))
    found = contents_of(composed, a_reward_that_reads_a_variable(machine))
    assert FUNCTION not in [each.subject for each in matters(found)]
