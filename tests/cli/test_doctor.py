"""``verl-padding doctor``: the command, and what it tells of settings."""

import json
from functools import partial
from importlib.metadata import requires
from io import StringIO

import pytest
from hydra.errors import HydraException
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from tests.support.fresh_processes import run_fresh
from tests.support.jobs_for_doctor import (
    AGENT,
    FLAG,
    MODEL,
    Machine,
    Reasons,
    assert_told,
    doctor_in_a_process,
    findings_of,
    prompts,
)
from verl_padding.cli.app import app
from verl_padding.cli.doctor import diagnose
from verl_padding.doctor import installation
from verl_padding.doctor.finding import wrong
from verl_padding.doctor.hidden_modules import hidden_modules
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.known_verl import KNOWN_VERL
from verl_padding.plan import STRATEGIES

pytestmark = pytest.mark.usefixtures("no_ray_cluster")

NO_RAY = (
    "import functools, ray\n@functools.wraps(ray.init)\n"
    "def no(*a, **k): raise AssertionError('Ray was started')\nray.init = no\n"
)
NO_ENTRY_POINT = (
    "import importlib.metadata as m; real = m.entry_points\n"
    "m.entry_points = lambda **kw: [e for e in real(**kw) if e.name != 'verl_padding']\n"
)


def diagnose_here(*overrides: str) -> tuple[int, str]:
    """The same in this process: what a job is told does not depend on how the command was started."""
    console = Console(width=400, record=True, file=StringIO())
    code = diagnose(JobArguments(overrides=overrides), console=console)
    return code, console.export_text()


def ranks_that_a_row_cannot_be_shared_by(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=3"]


def an_optimizer_that_verl_asserts_against(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.lr_scheduler_type=linear"]


def no_rollout_name(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.name=???"]


def no_logger_at_all(machine: Machine) -> list[str]:
    return ["trainer.logger=null"]


def a_word_for_a_number(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.n=one"]


def a_word_for_a_temperature(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.temperature=hot"]


def a_learning_rate_misspelt(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.lr=1e-3x"]


def no_prompts(machine: Machine) -> list[str]:
    return ["data.train_batch_size=0"]


def no_such_estimator(machine: Machine) -> list[str]:
    return ["algorithm.adv_estimator=grop"]


def no_such_policy_loss(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.policy_loss.loss_mode=vanila"]


def no_such_kl(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=low_var"]


def a_kl_of_no_weight(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=null"]


CANNOT_START: Reasons = {
    no_logger_at_all: ("trainer.logger", "null: has to be set"),
    ranks_that_a_row_cannot_be_shared_by: (
        "padding",
        "actor_rollout_ref.actor: 3 ranks compute a row together (Ulysses 3), which does not divide the job's 2 ranks",
    ),
    an_optimizer_that_verl_asserts_against: ("padding", "AssertionError: assert self.lr_scheduler_type in"),
    a_word_for_a_temperature: (
        "actor_rollout_ref.rollout.temperature",
        "hot: a number is needed; verl's own value is 1.0.",
    ),
    a_learning_rate_misspelt: ("actor_rollout_ref.actor.optim.lr", "1e-3x: a number is needed"),
    a_word_for_a_number: ("actor_rollout_ref.rollout.n", "one: a whole number is needed"),
    no_prompts: ("padding", "data.train_batch_size=0: must be at least 1"),
    no_such_estimator: ("verl's estimators and losses", "Unknown advantage estimator simply: grop"),
    no_such_policy_loss: ("verl's estimators and losses", "vanila"),
    no_such_kl: ("actor_rollout_ref.actor.kl_loss_type", "low_var: verl has no such KL penalty"),
    a_kl_of_no_weight: ("actor_rollout_ref.actor.kl_loss_coef", "null: the actor's loss has a KL term"),
    no_rollout_name: ("actor_rollout_ref.rollout.name", "???: has to be set"),
}
"""Why a job cannot start, or cannot end its first step -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
@pytest.mark.usefixtures("composed_once")
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(reason, job, machine):
    assert_told(findings_of(*job, FLAG, *reason(machine)), *CANNOT_START[reason])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.rollout.m=4", "Could not override 'actor_rollout_ref.rollout.m'"),
        ("data.train_batchsize=8", "verl has no such setting. Did you mean data.train_batch_size?"),
        ("padding.strateggy=rows", "padding.strateggy: no such setting. Choices: padding.strategy, "),
        ("data.train_files=~/train.parquet", "Hydra takes no ~ for the home folder. Write the whole path, or $HOME."),
        ("data.val_files=[~/a.parquet]", "data.val_files=[~/a.parquet]: Hydra takes no ~ for the home folder."),
        ("data.train_files=[a b", "OverrideParseException"),
    ],
)
def test_an_override_that_hydra_refuses_is_told_with_what_may_be_meant(override, told, job):
    assert_told(findings_of(*job, FLAG, override), "overrides", told)


def test_a_setting_of_ones_own_that_others_are_made_of_is_told_by_its_name(job):
    own = ["+model_dir=???", "trainer.experiment_name=${model_dir}/tiny"]
    assert_told(findings_of(*job, FLAG, *own), "overrides", "model_dir: ???, has to be set: other settings read it.")


@pytest.mark.usefixtures("composed_once")
def test_all_that_keeps_a_job_from_starting_is_told_at_once_and_every_look_goes_to_its_end(job):
    settings = {
        "actor_rollout_ref.model.path": "/nowhere/model",
        "actor_rollout_ref.rollout.name": "vlllm",
        f"{AGENT}.agent_loop_config_path": "/nowhere/agent.yaml",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": "/nowhere/tools.yaml",
        "algorithm.adv_estimator": "grop",
        "data.train_files": "/nowhere/train.parquet",
        "reward.custom_reward_function.path": "/nowhere/reward.py",
        "trainer.default_local_dir": f"{__file__}/checkpoints",
        "trainer.logger": "[clearml]",
        "trainer.resume_mode": "always",
    }
    found = findings_of(*job, FLAG, *(f"{setting}={value}" for setting, value in settings.items()))
    wrong = {finding.subject for finding in found if finding.verdict == "wrong"}
    assert wrong >= {*settings, "verl's estimators and losses"} - {"algorithm.adv_estimator"}, found
    assert not [finding.details for finding in found if finding.details]


def test_where_all_is_well_every_fixed_package_is_listed_with_what_is_supported(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", "--verbose"])
    said = result.output
    assert result.exit_code == 0, said
    bounds = {each.name: each.specifier for each in map(Requirement, requires("verl_padding") or []) if not each.marker}
    for package in installation.STACK:
        (line,) = [line for line in said.splitlines() if f" {package}: " in line]
        assert line.startswith("ok")
        assert f"(needed: {installation.in_order(bounds[package])})" in line
    for found in ("verl_padding.plugin", "registered", "found by Hydra", "Nothing wrong was found"):
        assert found in said


def test_bounds_are_told_with_the_lower_one_first():
    assert installation.in_order(Requirement("verl<0.10,>=0.9.1").specifier) == ">=0.9.1,<0.10"


def test_a_version_that_is_not_supported_is_named_with_the_one_that_is(monkeypatch):
    monkeypatch.setattr(installation, "_installed", lambda name: {"verl": "0.8.0", "ray": None}.get(name, "99.0"))
    findings = {finding.subject: finding for finding in installation.versions()}
    assert findings["verl"].verdict == "wrong"
    assert findings["verl"].told == "0.8.0, but >=0.9.1,<0.10 is needed: pip install 'verl>=0.9.1,<0.10'"
    assert findings["ray"].told.startswith("missing")
    assert findings["wrapt"].verdict == "wrong", "a package that is not always shown is, where it does not fit"


BROKEN = ("wrapt", "verl_padding.entry.hydra_search_path", "verl_padding.job.job_reader")


@pytest.fixture(scope="module")
def told_by_processes(job, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and everything that the command says in a process of its own, by what is special there.

    A module that cannot be imported where a padded job asks for it, no entry point, or nothing but Hydra's options and
    one fault of the job's.
    """
    configs = tmp_path_factory.mktemp("configs")
    (configs / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  logger: [sand]\n")
    options = ["-cd", str(configs), "--config-name", "mine", "--json"]
    without = {module: f"import sys\nsys.modules[{module!r}] = None\n" for module in BROKEN}
    cases = {
        module: doctor_in_a_process(*job, FLAG, before=without[module], RAY_ADDRESS="local") for module in BROKEN
    } | {
        "entry point": doctor_in_a_process(before=NO_ENTRY_POINT, VERL_USE_EXTERNAL_PLUGINS="none"),
        "options": doctor_in_a_process(
            *options, *job, FLAG, "trainer.logger=[rock]", before=NO_RAY, RAY_ADDRESS="local"
        ),
    }
    ended = {name: run_fresh(case) for name, case in cases.items()}
    return {name: (process.returncode, process.stdout + process.stderr) for name, process in ended.items()}


@pytest.mark.parametrize(
    ("module", "failed"),
    [
        ("verl_padding.entry.hydra_search_path", "config groups"),
        ("verl_padding.job.job_reader", "trainers"),
        ("wrapt", "entry point"),
    ],
    ids=["Hydra hook", "trainers", "entry point"],
)
def test_what_fails_is_told_with_its_traceback(module, failed, told_by_processes):
    code, said = told_by_processes[module]
    assert code == 1
    assert f"{failed}: failed" in said
    assert "Traceback" in said
    assert f"import of {module} halted" in said


@pytest.mark.parametrize("module", ["wrapt", "verl_padding.job.job_reader"])
def test_every_table_is_told_where_the_plugin_is_broken_and_the_job_asks_for_it(module, told_by_processes):
    code, said = told_by_processes[module]
    assert code == 1
    for told in ("versions", "plug-in", "TransferQueue", "entry point", "Traceback"):
        assert told in said


def test_a_missing_entry_point_and_a_policy_that_leaves_it_out_are_told(told_by_processes):
    code, said = told_by_processes["entry point"]
    assert code == 1
    assert "entry point: 0 of them" in said
    assert "verl loads only these plug-ins: none" in said


def test_a_job_that_can_run_is_told_in_words(job):
    code, said = diagnose_here(*job, FLAG)
    assert code == 0, said
    assert "sync, by PaddedTrainerSync" in said
    assert "prompt, 8 prompts x 4 sessions per batch" in said
    assert "4 optimizer steps per batch, 2 data-parallel ranks" in said
    assert "verl's own checks" in said
    assert "Nothing wrong was found." in said


@pytest.mark.usefixtures("composed_once")
def test_a_prefix_grouper_that_verl_ignores_is_told(job):
    grouper = "actor_rollout_ref.actor.use_prefix_grouper"
    assert grouper not in diagnose_here(*job, FLAG)[1]
    code, said = diagnose_here(*job, FLAG, f"{grouper}=true")
    assert code == 0, said
    assert f"no engine of verl {KNOWN_VERL} reads it; padding.sharing=chains computes shared prefixes once" in said


@pytest.mark.usefixtures("composed_once")
def test_that_code_of_ones_own_was_not_run_is_said_at_the_end(job, machine):
    own = [f"reward.custom_reward_function.path={machine.file('mine.py', 'def compute_score(**given): return 1.0')}"]
    assert diagnose_here(*job, FLAG, *own)[1].endswith("Nothing wrong was found; code of your own was read, not run.\n")


def test_values_that_hydra_knows_only_as_a_job_runs_are_known(job):
    code, said = diagnose_here(
        *job,
        FLAG,
        "trainer.default_local_dir=${hydra:runtime.output_dir}/checkpoints",
        "trainer.rollout_data_dir=${hydra:runtime.cwd}/rollouts",
        "trainer.experiment_name=${hydra:job.name}",
        "trainer.validation_data_dir=${hydra:job_logging.handlers.file.filename}",
    )
    assert code == 0, said


def test_a_job_without_the_flag_is_told_to_be_verls_own(job):
    code, said = diagnose_here(*job)
    assert code == 0, said
    assert "not asked for: verl trains as if the plug-in were not there" in said
    assert "Nothing wrong was found, but the job trains without padding; 1 not looked at." in said


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("padding.strategy=promt", f"padding.strategy='promt': not a choice. Choices: {', '.join(STRATEGIES)}."),
        ("trainer.v1.trainer_mode=mine", "trainer.v1.trainer_mode='mine': Unknown trainer 'mine'"),
        ("actor_rollout_ref.rollout.mode=sync", "verl's rollout: refuses the job"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip-cov",
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip-cov: Unsupported loss mode: clip-cov.",
        ),
        ("algorithm.adv_estimator=GRPO", "algorithm.adv_estimator=GRPO: Unknown advantage estimator simply: GRPO"),
        ("+trainer.v1.sync.parameter_sync_step=2", "trainer.v1.sync.parameter_sync_step=2: this mode's rollout sleeps"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16 of 'actor' does not divide data.train_batch_size=8",
        ),
    ],
)
@pytest.mark.usefixtures("composed_once")
def test_a_job_that_cannot_run_is_refused_with_the_reason(job, override, told):
    code, said = diagnose_here(*job, FLAG, override)
    assert code == 1
    assert told in said.replace("\n", " ") or told in said, said


@pytest.mark.usefixtures("composed_once")
def test_a_setting_of_a_section_that_verl_refuses_is_told_without_the_flag_too(job):
    code, said = diagnose_here(*job, "actor_rollout_ref.actor.optim.lr_scheduler_type=linear")
    assert code == 1
    assert "Correct actor_rollout_ref.actor.optim.lr_scheduler_type=linear." in said.replace("\n", " "), said


@pytest.mark.usefixtures("composed_once")
def test_a_path_that_verl_takes_no_part_of_is_told_once(job, tiny_model):
    wrong = [finding for finding in findings_of(*job, f"{MODEL}={tiny_model}/") if finding.verdict == "wrong"]
    assert [finding.subject for finding in wrong] == [MODEL], wrong


@pytest.mark.usefixtures("composed_once")
def test_what_is_legal_though_rare_is_not_called_wrong(job, tmp_path, monkeypatch):
    data = prompts(8)
    for number in range(2):
        data.to_parquet(tmp_path / f"part{number}.parquet")
    (tmp_path / "rewards.py").write_text(
        "globals()['compute_score'] = len\nclass Manager: ...\nclass Loops:\n    def make(**kwargs): ...\n"
    )
    (tmp_path / "agent.yaml").write_text("- name: mine\n  _target_: rewards.Loops.make\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = findings_of(
        *job,
        FLAG,
        f"data.train_files={tmp_path}/part*.parquet",
        "data.train_batch_size=16",
        f"reward.custom_reward_function.path={tmp_path / 'rewards.py'}",
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={tmp_path / 'rewards.py'}",
        "reward.reward_manager.name=Manager",
        f"{AGENT}.agent_loop_config_path={tmp_path / 'agent.yaml'}",
        f"{AGENT}.default_agent_loop=mine",
    )
    assert {finding.verdict for finding in found} == {"ok"}, [each for each in found if each.verdict != "ok"]


def test_a_config_group_that_is_not_there_is_told_with_its_choices_and_no_search_path(job):
    (told,) = [finding.told for finding in findings_of(*job, "+padding=promt") if finding.verdict == "wrong"]
    assert "Could not find 'padding/promt' Available options in 'padding': " in told
    assert "provider" not in told


@pytest.mark.usefixtures("composed_once")
def test_a_job_that_can_start_has_nothing_wrong_and_nothing_to_be_warned_of(job):
    found = findings_of(*job, FLAG, "algorithm.adv_estimator=gae")
    assert {finding.verdict for finding in found} == {"ok"}, found
    subjects = {finding.subject for finding in found}
    assert subjects >= {"critic.model.path", "data.train_batch_size", "VERL_PLATFORM", "lengths", "actor", "critic"}


@pytest.mark.parametrize(
    ("overrides", "setting", "told"),
    [
        (
            ["data.max_response_length=4000"],
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "4096: below data.max_prompt_length + data.max_response_length = 4512",
        ),
        (["algorithm.adv_estimator=gae", "critic.forward_micro_batch_size_per_gpu=4"],
         "critic.forward_micro_batch_size_per_gpu",
         "4: has no effect: the critic's engine reads +critic.fsdp.infer_micro_batch_size_per_gpu"),
        (["+data.train_batchsize=8"], "data.train_batchsize",
         "8: verl has no such setting. Did you mean data.train_batch_size?"),
        (["data.truncation=middel"], "data.truncation",
         "middel: has no effect: verl's v1 trainers cut no prompt."),
        (["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=true",
          "actor_rollout_ref.model.target_modules=[q_proj,vproj]"],
         "actor_rollout_ref.model.target_modules",
         "vproj: the model has no such module, the others are adapted. Its linear layers are down_proj, "),
        (["actor_rollout_ref.model.custom_chat_template=a.jinja"], "actor_rollout_ref.model.custom_chat_template",
         "a.jinja: a text without any place for messages."),
        (["padding.timing_dir=laps"], "padding.timing_dir",
         "laps: has no effect: no file of laps is written. Set padding.timing=true, or leave it out"),
        (["custom_reward_function.path=mine.py"], "custom_reward_function.path",
         "mine.py: has no effect: verl.trainer.main_ppo reads reward.custom_reward_function.path"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("composed_once")
def test_what_cannot_be_meant_is_warned_of_and_the_job_can_start(overrides, setting, told, job):
    found = findings_of(*job, FLAG, *overrides)
    assert [each for each in found if (each.verdict, each.subject) == ("warning", setting) and told in each.told], found
    assert not [each for each in found if each.verdict == "wrong"]


def test_folders_and_names_of_configs_of_the_users_own_are_taken_as_hydra_takes_them(job, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  project_name: my_own\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "big.yaml").write_text("# @package _global_\ntrainer:\n  project_name: bigger\n")
    folder = str(tmp_path)
    compose = partial(JobArguments, overrides=tuple(job))
    assert compose_job(compose(config_dir=folder, config_name="mine")).trainer.project_name == "my_own"
    with_search_path = (*job, f"hydra.searchpath=[file://{folder}]", "+more=big")
    assert compose_job(JobArguments(overrides=with_search_path)).trainer.project_name == "bigger"
    searching = (*job, "hydra.searchpath=[pkg://verl.trainer.config]")
    assert (
        compose_job(JobArguments(overrides=searching, config_path=folder, config_name="mine")).trainer.project_name
        == "my_own"
    )
    with pytest.raises(HydraException, match="In 'mine': Could not load 'ppo_trainer'"):
        compose_job(compose(config_path=folder, config_name="mine"))
    with pytest.raises(HydraException, match=r"--config-dir=/nowhere: there is no such folder"):
        compose_job(compose(config_dir="/nowhere"))


def test_the_command_takes_hydras_options_and_tells_all_as_json(told_by_processes):
    code, said = told_by_processes["options"]
    told = json.loads(said)
    assert (code, told["ok"]) == (1, False)
    findings = [finding for look in told["looks"] for finding in look["findings"]]
    (matter,) = [finding for finding in findings if finding["verdict"] == "wrong"]
    assert matter["subject"] == "trainer.logger"
    assert matter["told"].startswith("rock: verl has no logger of this name. Choices: console, file, wandb")


def test_ray_is_not_started(told_by_processes):
    _, said = told_by_processes["options"]
    looks = [look["title"] for look in json.loads(said)["looks"]]
    assert looks[-3:] == ["plan", "verl's own checks", "first step"]
    assert "Ray was started" not in said


@pytest.mark.parametrize("padding", [(), (FLAG,)], ids=["verl's own", "padded"])
@pytest.mark.usefixtures("composed_once")
def test_what_verls_trainer_would_refuse_is_told_with_and_without_the_flag(job, padding):
    separate = [
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_file",
        "trainer.v1.separate_async.parameter_sync_step=4",
    ]
    code, said = diagnose_here(*job, *separate, *padding)
    assert code == 0, said
    code, said = diagnose_here(*job, *separate, *padding, "data.train_batch_size=16")
    assert code == 1
    assert "verl's trainer: refuses the job" in said
    assert "train_batch_size must equal parameter_sync_step * ppo_mini_batch_size" in said.replace("\n", " ")


@pytest.mark.usefixtures("composed_once")
def test_a_trainer_that_nobody_knows_is_refused_without_the_flag_too(job):
    code, said = diagnose_here(*job, "trainer.v1.trainer_mode=sycn")
    assert code == 1
    assert "trainer.v1.trainer_mode='sycn': Unknown trainer" in said


@pytest.mark.usefixtures("composed_once")
def test_a_padded_trainer_is_told_as_one_without_the_flag_too(job):
    code, said = diagnose_here(*job, "trainer.v1.trainer_mode=padded_sync")
    assert code == 0, said
    assert "padded_sync, by PaddedTrainerSync" in said
    assert "4 optimizer steps per batch" in said


@pytest.mark.usefixtures("composed_once")
def test_a_narrow_terminal_breaks_no_key(job):
    key = "actor_rollout_ref.actor.ppo_micro_batch_size"
    console = Console(width=80, record=True, file=StringIO())
    assert diagnose(JobArguments(overrides=(*job, f"{key}=4")), console=console) == 0
    said = console.export_text()
    assert f"{key}=4: has no effect" in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_file_that_hides_a_module_of_pythons_own_is_named(tmp_path, monkeypatch):
    package = tmp_path / "queue"
    package.mkdir()
    for file in (package / "__init__.py", tmp_path / "os.py", tmp_path / "letters.py"):
        file.touch()
    (tmp_path / "json").mkdir()  # a folder that is no package hides nothing
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    failure = wrong("entry point", "failed", details="AttributeError: module 'queue' has no attribute 'LifoQueue'")
    (found,) = hidden_modules([failure])
    assert found.verdict == "wrong"
    assert f"{package / '__init__.py'}: has the name of a module of Python's own, 'queue'" in found.told
    (found,) = hidden_modules([])
    assert found.verdict == "warning"
    monkeypatch.chdir("/")
    assert not list(hidden_modules([failure]))
    monkeypatch.setenv("PYTHONPATH", f"/nowhere:{tmp_path}")
    assert [each.verdict for each in hidden_modules([failure])] == ["wrong"]
