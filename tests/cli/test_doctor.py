"""``verl-padding doctor``: what is in, what is not, whether a job can start here."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.metadata import requires
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from packaging.requirements import Requirement
from rich.console import Console

from verl_padding.cli.doctor import diagnose
from verl_padding.doctor import installation, packages
from verl_padding.doctor.agent_loops import loops_of_job
from verl_padding.doctor.chat_templates import template_of_job
from verl_padding.doctor.finding import Finding, Look
from verl_padding.doctor.installation import plug_in
from verl_padding.doctor.job import look_at_files, look_at_first_step, looks_at_job
from verl_padding.doctor.loaded_model import LoadedModel
from verl_padding.doctor.named_objects import is_module, refuse_missing_object
from verl_padding.doctor.passed_on import values_for_rollout, values_passed_on
from verl_padding.doctor.prompts import MOST_BYTES
from verl_padding.local.tiny_models import make_byte_tokenizer, make_tiny_model
from verl_padding.plan import STRATEGIES
from verl_padding.verl_job import engines_on_cpu
from verl_padding.verl_job.composition import JobArguments, compose_job
from verl_padding.verl_job.known_verl import KNOWN_VERL

BREAK_HYDRA_HOOK = "import sys; sys.modules['verl_padding.entry.hydra_search_path'] = None\n"
BREAK_TRAINERS = "import sys; sys.modules['verl_padding.trainer.mixin'] = None\n"
NO_ENTRY_POINT = (
    "import importlib.metadata as m; real = m.entry_points\n"
    "m.entry_points = lambda **kw: [e for e in real(**kw) if e.name != 'verl_padding']\n"
)


AGENT = "actor_rollout_ref.rollout.agent"
MODEL = "actor_rollout_ref.model.path"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


def run_doctor(*arguments: str, before: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and everything that is said, with some Python before it starts."""
    code = f"{before}import sys; sys.argv[0] = 'verl-padding'; from verl_padding.cli.app import app; app()"
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [sys.executable, "-c", code, "doctor", *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(autouse=True)
def no_ray_cluster(monkeypatch) -> None:
    """What else runs on this machine is nothing to these jobs."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


MESSAGES = [{"role": "user", "content": "1+1"}]


def prompts(number: int, **columns: list) -> pandas.DataFrame:
    """As verl's own scripts write them."""
    row = {
        "prompt": MESSAGES,
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return pandas.DataFrame([row] * number).assign(**columns)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A model's folder; nobody writes into it."""
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_model) -> list[str]:
    """Overrides of a job that can start."""
    folder = tmp_path_factory.mktemp("job")
    prompts(16).to_parquet(folder / "train.parquet")
    return [
        "+local=cpu",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]


def test_where_all_is_well_every_fixed_package_is_listed_with_what_is_supported():
    code, said = run_doctor("--verbose")
    assert code == 0, said
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


@pytest.mark.parametrize(
    ("before", "failed"),
    [
        (BREAK_HYDRA_HOOK, "config groups"),
        (BREAK_TRAINERS, "trainers"),
        ("sys = __import__('sys'); sys.modules['wrapt'] = None\n", "entry point"),
    ],
    ids=["Hydra hook", "trainers", "entry point"],
)
def test_what_fails_is_told_with_its_traceback(before, failed):
    code, said = run_doctor(before=before)
    assert code == 1
    assert f"{failed}: failed" in said
    assert "Traceback" in said
    assert "ImportError" in said or "ModuleNotFoundError" in said


def test_a_missing_entry_point_and_a_policy_that_leaves_it_out_are_told():
    code, said = run_doctor(before=NO_ENTRY_POINT)
    assert code == 1
    assert "entry point: 0 of them" in said
    code, said = run_doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    assert code == 1
    assert "verl loads only these plug-ins: none" in said


def diagnose_here(*overrides: str) -> tuple[int, str]:
    """The same in this process: what a job is told does not depend on how the command was started."""
    console = Console(width=400, record=True, file=StringIO())
    code = diagnose(JobArguments(overrides=overrides), console=console)
    return code, console.export_text()


def findings_of(*overrides: str, platform: str = "cpu") -> list[Finding]:
    """All that is found about a job; about the installation, only what its environment adds."""
    looks = [Look.at("plug-in", plug_in), *looks_at_job(JobArguments(overrides=overrides), platform)]
    return [finding for look in looks for finding in look.findings]


@pytest.fixture(scope="module")
def composed(job) -> DictConfig:
    """The config of that job. Nobody writes into it."""
    return compose_job(JobArguments(overrides=(*job, "+padding=prompt")))


def with_settings(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """A copy with some settings changed or added, which takes far less than composing it anew."""
    config = deepcopy(composed)
    with open_dict(config):
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), merge=False)
    return config


def contents_of(composed: DictConfig, overrides: list[str]) -> list[Finding]:
    """What is found of a job's models, data and code, of what is in them, and of values that verl passes on."""
    config = with_settings(composed, overrides)
    files = look_at_files(config)
    return [*values_passed_on(config), *files.findings, *look_at_first_step(config, files).findings]


def test_a_job_that_can_run_is_told_in_words(job):
    code, said = diagnose_here(*job, "+padding=prompt")
    assert code == 0, said
    assert "sync, by PaddedTrainerSync" in said
    assert "prompt, 8 prompts x 4 sessions per batch" in said
    assert "4 optimizer steps per batch, 2 data-parallel ranks" in said
    assert "verl's own checks" in said
    assert "Nothing wrong was found." in said


def test_a_prefix_grouper_that_verl_ignores_is_told(job):
    grouper = "actor_rollout_ref.actor.use_prefix_grouper"
    assert grouper not in diagnose_here(*job, "+padding=prompt")[1]
    code, said = diagnose_here(*job, "+padding=prompt", f"{grouper}=true")
    assert code == 0, said
    assert f"no engine of verl {KNOWN_VERL} reads it; padding.sharing=chains computes shared prefixes once" in said


def test_values_that_hydra_knows_only_as_a_job_runs_are_known(job):
    code, said = diagnose_here(
        *job,
        "+padding=prompt",
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
    assert "Nothing wrong was found, but the job trains without padding." in said


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("padding.strategy=promt", f"padding.strategy='promt': not a choice. Choices: {', '.join(STRATEGIES)}."),
        ("actor_rollout_ref.rollout.m=4", "Could not override 'actor_rollout_ref.rollout.m'"),
        ("trainer.v1.trainer_mode=mine", "trainer.v1.trainer_mode='mine': Unknown trainer 'mine'"),
        ("actor_rollout_ref.rollout.mode=sync", "verl's rollout: refuses the job"),
        ("+trainer.v1.sync.parameter_sync_step=2", "trainer.v1.sync.parameter_sync_step=2: this mode's rollout sleeps"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16 of 'actor' does not divide data.train_batch_size=8",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_the_reason(job, override, told):
    code, said = diagnose_here(*job, "+padding=prompt", override)
    assert code == 1
    assert told in said.replace("\n", " ") or told in said, said


class Machine:
    """A folder of a user's, and the environment; what a test changes there is a reason why a job cannot start."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path):
        self.folder, self.patch, self.tiny_model = folder, monkeypatch, tiny_model

    def file(self, name: str, text: str = "") -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def model(self) -> Path:
        """A copy of the job's own model."""
        return Path(shutil.copytree(self.tiny_model, self.folder / "model"))

    def loop(self, text: str) -> list[str]:
        """Overrides of a job whose agent loop `Mine` is in a module of this text."""
        module = f"loops_of_{self.folder.name}"
        self.file(f"{module}.py", text)
        self.patch.syspath_prepend(self.folder)
        path = self.file("agent.yaml", f"- name: mine\n  _target_: {module}.Mine\n")
        return [f"{AGENT}.agent_loop_config_path={path}", f"{AGENT}.default_agent_loop=mine"]

    def lacks(self, package: str) -> None:
        """Whether it is installed here or not."""
        self.patch.setattr(packages, "is_module", lambda name: name.split(".")[0] != package and is_module(name))


def no_vllm(machine: Machine) -> list[str]:
    machine.lacks("vllm")
    return ["actor_rollout_ref.rollout.name=vllm"]


def no_such_rollout(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.name=vlllm"]


def no_megatron(machine: Machine) -> list[str]:
    machine.lacks("megatron")
    return ["actor_rollout_ref.actor.strategy=megatron"]


def no_logger(machine: Machine) -> list[str]:
    return ["trainer.logger=[console,clearml]"]


def no_cuda(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_PLATFORM")
    return ["trainer.device=cuda"]


def no_platform(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_PLATFORM")
    return []


def no_model(machine: Machine) -> list[str]:
    return [f"actor_rollout_ref.model.path={machine.folder}/nowhere"]


def a_model_without_weights(machine: Machine) -> list[str]:
    machine.file("config.json", "{}")
    return [f"actor_rollout_ref.model.path={machine.folder}"]


def a_model_of_a_hub_that_is_out_of_reach(machine: Machine) -> list[str]:
    from huggingface_hub import constants

    machine.patch.setattr(constants, "HF_HUB_OFFLINE", False)
    machine.patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    machine.patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    return ["actor_rollout_ref.model.path=some/model", "padding.cost_model=model"]


def no_training_file(machine: Machine) -> list[str]:
    return ["data.train_files=/nowhere/train.parquet"]


def no_validation_file(machine: Machine) -> list[str]:
    return ["data.val_files=/nowhere/val.parquet"]


def a_training_file_that_is_none(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.file('train.parquet', 'no parquet')}"]


def too_few_prompts(machine: Machine) -> list[str]:
    return ["data.train_batch_size=64"]


def another_prompt_column(machine: Machine) -> list[str]:
    return ["data.prompt_key=question"]


def _data(machine: Machine, data: pandas.DataFrame) -> list[str]:
    data.to_parquet(machine.folder / "data.parquet")
    return [f"data.train_files={machine.folder / 'data.parquet'}"]  # and, with +local=cpu, those of validation


def prompts_of_plain_text(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, prompt=["1+1"] * 16))


def prompts_of_another_form(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, prompt=[[{"from": "human", "value": "hi"}]] * 16))


def no_ground_truth(machine: Machine) -> list[str]:
    return _data(machine, prompts(16).drop(columns="reward_model"))


def a_folder_of_data(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.folder}"]


def a_checkpoint_folder_that_is_a_file(machine: Machine) -> list[str]:
    return [f"trainer.default_local_dir={machine.file('checkpoints')}"]


def a_reward_of_other_arguments(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "def compute_score(text):\n    return 0.0\n")
    return [f"reward.custom_reward_function.path={path}"]


def a_reward_that_imports_what_is_not_there(machine: Machine) -> list[str]:
    path = machine.file("rewards.py", "import sympyy\ndef compute_score(**kwargs):\n    return 0.0\n")
    return [f"reward.custom_reward_function.path={path}"]


def ranks_that_a_row_cannot_be_shared_by(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=3"]


def an_optimizer_that_verl_asserts_against(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.lr_scheduler_type=linear"]


def fewer_cpus_than_verl_asks_for(machine: Machine) -> list[str]:
    return ["ray_kwargs.ray_init.num_cpus=6"]


def no_reward_file(machine: Machine) -> list[str]:
    return ["reward.custom_reward_function.path=/nowhere/reward.py"]


def no_reward_function(machine: Machine) -> list[str]:
    return [f"reward.custom_reward_function.path={machine.file('reward.py', 'def reward(): ...')}"]


def no_such_agent_loop(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.agent.default_agent_loop=mine"]


def a_row_with_another_agent_loop(machine: Machine) -> list[str]:
    path = machine.folder / "agents.parquet"
    prompts(8, agent_name=["tool_agent", "mine"] * 4).to_parquet(path)
    return [f"data.train_files={path}"]


def no_agent_loop_file(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.agent.agent_loop_config_path=/nowhere/agent.yaml"]


def an_agent_loop_without_its_module(machine: Machine) -> list[str]:
    path = machine.file("agent.yaml", "- name: mine\n  _target_: no_such_package.agent.Mine\n")
    return [f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}"]


def no_tool(machine: Machine) -> list[str]:
    path = machine.file(
        "tools.yaml", "tools:\n  - class_name: verl.tools.base_tool.Hammer\n    config: {type: native}\n"
    )
    return [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}"]


def no_folder_for_the_log(machine: Machine) -> list[str]:
    machine.patch.setenv("VERL_FILE_LOGGER_PATH", f"{machine.folder}/runs/metrics.jsonl")
    return []


def checkpoints_below_a_file(machine: Machine) -> list[str]:
    return [f"trainer.default_local_dir={machine.file('checkpoints')}/run"]


def no_checkpoint(machine: Machine) -> list[str]:
    return ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_7"]


def no_external_module(machine: Machine) -> list[str]:
    machine.patch.setenv("VERL_USE_EXTERNAL_MODULES", "json,my_modul")
    return []


def no_rollout_name(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.name=???"]


def an_unknown_setting_of_ours(machine: Machine) -> list[str]:
    return ["padding.strateggy=rows"]


def a_logger_without_its_key(machine: Machine) -> list[str]:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        machine.patch.delenv(name, raising=False)
    machine.patch.setenv("NETRC", f"{machine.folder}/netrc")
    return ["trainer.logger=[console,wandb]"]


def no_logger_at_all(machine: Machine) -> list[str]:
    return ["trainer.logger=null"]


def a_word_for_a_number(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.n=one"]


def a_word_for_a_temperature(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.temperature=hot"]


def a_learning_rate_misspelt(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.lr=1e-3x"]


def a_rollout_of_more_devices_than_there_are(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.tensor_model_parallel_size=4", "actor_rollout_ref.rollout.data_parallel_size=2"]


def no_prompts(machine: Machine) -> list[str]:
    return ["data.train_batch_size=0"]


def no_such_estimator(machine: Machine) -> list[str]:
    return ["algorithm.adv_estimator=grop"]


def no_such_policy_loss(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.policy_loss.loss_mode=vanila"]


def no_such_kl(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=low_var"]


def no_such_reward_manager(machine: Machine) -> list[str]:
    return ["reward.reward_manager.name=nope"]


def no_such_object_of_a_reward_manager(machine: Machine) -> list[str]:
    path = machine.file("manager.py", "class Mine: ...")
    return ["reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={path}"]


def a_ray_cluster_of_another_size(machine: Machine) -> list[str]:
    machine.patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return []


def no_such_resume_mode(machine: Machine) -> list[str]:
    return ["trainer.resume_mode=always"]


def a_checkpoint_that_is_none(machine: Machine) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={machine.folder}"]


def a_latest_checkpoint_of_no_step(machine: Machine) -> list[str]:
    machine.file("latest_checkpointed_iteration.txt", "seven")
    return [f"trainer.default_local_dir={machine.folder}"]


def an_external_module_that_fails(machine: Machine) -> list[str]:
    machine.file("broken_module.py", "raise ValueError('boom')")
    machine.patch.syspath_prepend(machine.folder)
    machine.patch.setenv("VERL_USE_EXTERNAL_MODULES", "broken_module")
    return []


def no_such_teacher(machine: Machine) -> list[str]:
    teacher = "distillation.teacher_models.teacher_model"
    return [
        "distillation.enabled=true",
        "distillation.n_gpus_per_node=2",
        "distillation.nnodes=1",
        f"{teacher}.num_replicas=2",
        f"{teacher}.model_path=/nowhere/teacher",
        f"{teacher}.inference.tensor_model_parallel_size=1",
    ]


def no_such_format_of_numbers(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.fsdp_config.model_dtype=float23"]


def lora_on_modules_of_another_model(machine: Machine) -> list[str]:
    model = "actor_rollout_ref.model"
    return [f"{model}.lora_rank=8", f"{model}.target_modules=[query_key_value]"]


def lora_on_a_pattern_that_no_module_has(machine: Machine) -> list[str]:
    model = "actor_rollout_ref.model"
    return [f"{model}.lora_rank=8", f"{model}.target_modules=q_proj"]  # PEFT takes it for a whole name


def lora_that_the_rollout_does_not_take(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.lora_rank=8"]


def an_optimizer_that_torch_lacks(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.optimizer=AdamW8bit"]


def an_optimizer_of_no_module(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes_.optim"]


def one_beta(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.betas=[0.9]"]


def fewer_than_no_loaders(machine: Machine) -> list[str]:
    return ["data.dataloader_num_workers=-1"]


def no_agent_loop_worker(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.agent.num_workers=0"]


def a_number_in_the_environment(machine: Machine) -> list[str]:
    return ["+ray_kwargs.ray_init.runtime_env.env_vars.MY_RETRIES=3"]


def a_template_that_is_cut_off(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.custom_chat_template='{% for m in messages %}{{ m.content }'"]


def flash_attention_on_a_cpu(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"]


def laps_in_a_file(machine: Machine) -> list[str]:
    return ["padding.timing=true", f"padding.timing_dir={machine.file('timing')}"]


def a_setting_misspelt(machine: Machine) -> list[str]:
    return ["data.train_batchsize=8"]


def _with_model(folder: Path) -> list[str]:
    return [f"{MODEL}={folder}"]


def _changed(folder: Path, name: str, **changes: object) -> list[str]:
    """Overrides for a model with other values in one of its files; None takes a key out."""
    told = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    return _with_model(folder)


def weights_that_are_a_pointer(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "model.safetensors").write_text(LFS_POINTER)
    return _with_model(folder)


def old_weights_that_are_a_pointer(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text(LFS_POINTER)
    return _with_model(folder)


def weights_that_are_cut_off(machine: Machine) -> list[str]:
    folder = machine.model()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    return _with_model(folder)


def old_weights_that_are_cut_off(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(100))
    return _with_model(folder)


def weights_of_which_a_part_is_missing(machine: Machine) -> list[str]:
    folder = machine.model()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return _with_model(folder)


def weights_of_another_model(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", intermediate_size=256)


def a_tokenizer_that_is_a_pointer(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "tokenizer.json").write_text(LFS_POINTER)
    return _with_model(folder)


def a_config_that_is_no_json(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "config.json").write_text('{"model_type": "qwen2",')
    return _with_model(folder)


def a_kind_of_model_that_nobody_knows(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", model_type="qwen99")


def two_architectures(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", architectures=["Qwen2ForCausalLM", "Qwen2Model"])


def quantized_weights_without_their_package(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def an_attention_that_is_misspelt(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.override_config.attn_implementation=spda"]


def heads_that_ranks_cannot_share(machine: Machine) -> list[str]:
    machine.patch.setattr(packages, "is_module", lambda name: True)
    return [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=20",
        "data.train_batch_size=8",
    ]


def a_layer_to_wrap_that_the_model_lacks(machine: Machine) -> list[str]:
    setting = "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    return [f"+{setting}=[LlamaDecoderLayer]"]


def a_tokenizer_without_template(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "chat_template.jinja").unlink()
    return _with_model(folder)


def a_loop_that_wants_a_template(machine: Machine) -> list[str]:
    return [
        *a_tokenizer_without_template(machine),
        *machine.loop(LOOP + "        self.tokenizer.apply_chat_template(kwargs['raw_prompt'])\n"),
    ]


def a_filter_that_wants_a_template(machine: Machine) -> list[str]:
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + SCORED), "data.filter_overlong_prompts=true"]


def a_tokenizer_without_any_end(machine: Machine) -> list[str]:
    kind = "PreTrainedTokenizerFast"  # Qwen's own would have one in any case
    folder = machine.model()
    _changed(folder, "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    return _changed(folder, "tokenizer_config.json", eos_token=None, pad_token=None, tokenizer_class=kind)


def tokens_that_the_model_lacks(machine: Machine) -> list[str]:
    make_byte_tokenizer(["<|more|>"]).save_pretrained(machine.folder / "tokenizer")
    data = prompts(16, prompt=[[{"role": "user", "content": "1+1<|more|>"}]] * 16)
    return [*_data(machine, data), f"actor_rollout_ref.model.tokenizer_path={machine.folder / 'tokenizer'}"]


def a_template_that_refuses_the_prompts(machine: Machine) -> list[str]:
    template = "{{ raise_exception('System role not supported') }}"
    return [f'actor_rollout_ref.model.custom_chat_template="{template}"']


def messages_without_content(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, prompt=[[{"role": "user", "content": None, "name": "x"}]] * 16))


def images_that_nobody_looks_at(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, images=[["cat.png"]] * 16))


def a_filter_that_leaves_nothing(machine: Machine) -> list[str]:
    return ["data.filter_overlong_prompts=true", "data.max_prompt_length=3"]


def a_filter_that_leaves_less_than_a_batch(machine: Machine) -> list[str]:
    data = prompts(16, prompt=[MESSAGES] * 7 + [[{"role": "user", "content": "1+" * 99}]] * 9)
    return [*_data(machine, data), "data.filter_overlong_prompts=true", "data.max_prompt_length=50"]


def files_that_do_not_go_together(machine: Machine) -> list[str]:
    for name, index in (("a", 1), ("b", "one")):
        prompts(8, extra_info=[{"index": index}] * 8).to_parquet(machine.folder / f"{name}.parquet")
    return [f"data.train_files={machine.folder}/*.parquet"]


def extra_info_of_text(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, extra_info=["hard"] * 16))


def lines_of_which_one_is_cut_off(machine: Machine) -> list[str]:
    whole = prompts(16).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', whole + whole[:20])}"]


def lines_without_prompts(machine: Machine) -> list[str]:
    lines = prompts(16).rename(columns={"prompt": "question"}).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', lines)}"]


def lines_that_are_too_few(machine: Machine) -> list[str]:
    lines = prompts(7).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', lines)}"]


def a_file_of_data_that_is_a_pointer(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.file('train.parquet', LFS_POINTER)}"]


def a_column_with_a_name_of_verls(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, responses=["2"] * 16))


def prompts_longer_than_the_rollout_takes(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_model_len=8"]


def an_adapter_that_is_none(machine: Machine) -> list[str]:
    return [f"actor_rollout_ref.model.lora_adapter_path={machine.folder}"]


def nothing_to_validate_on(machine: Machine) -> list[str]:
    prompts(16).iloc[:0].to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet"]


def a_source_that_verl_has_no_score_for(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, data_source=["sums"] * 16))


def no_ground_truth_in_its_column(machine: Machine) -> list[str]:
    return _data(machine, prompts(16, reward_model=[{"style": "rule", "answer": "2"}] * 16))


def parts_that_make_no_batch(machine: Machine) -> list[str]:
    return ["data.gen_batch_size=3"]


LOOP = """\
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Mine(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
"""
"""The beginning of an agent loop of a user's own."""
SCORED = "        return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], reward_score=1.0)\n"


def rewards_that_nobody_computes(machine: Machine) -> list[str]:
    data = _data(machine, prompts(16).drop(columns=["reward_model", "data_source"]))
    return [*data, *machine.loop(LOOP + SCORED.replace(", reward_score=1.0", ""))]


def a_loop_that_does_not_run(machine: Machine) -> list[str]:
    return machine.loop(LOOP.replace("def run(", "def start(") + SCORED)


def a_loop_that_takes_no_more(machine: Machine) -> list[str]:
    return machine.loop(LOOP.replace("**kwargs", "raw_prompt") + SCORED)


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


def rewards_of_no_worker(machine: Machine) -> list[str]:
    return ["reward.num_workers=0"]


def a_data_set_that_is_none(machine: Machine) -> list[str]:
    path = machine.file("mine.py", "class Mine:\n    def __getitem__(self, number): ...\n")
    return [f"data.custom_cls.path={path}", "data.custom_cls.name=Mine"]


def _tools(machine: Machine, kind: str = "native", schema: str = "") -> list[str]:
    tool = f"tools:\n- class_name: verl.tools.base_tool.BaseTool\n  config: {{type: {kind}}}\n{schema}"
    return [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={machine.file('tools.yaml', tool)}"]


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


def a_carrier_of_weights_that_is_misspelt(machine: Machine) -> list[str]:
    return [
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=ncclx",
    ]


def an_experiment_in_a_folder(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    return ["trainer.logger=[file]", "trainer.experiment_name=sums/first"]


def _checkpoint(machine: Machine, *files: str) -> list[str]:
    folder = machine.folder / "global_step_7"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]


def a_checkpoint_that_is_empty(machine: Machine) -> list[str]:
    return _checkpoint(machine)


def a_checkpoint_of_more_ranks(machine: Machine) -> list[str]:
    return _checkpoint(machine, *(f"actor/model_world_size_4_rank_{rank}.pt" for rank in range(4)))


CANNOT_TRAIN: dict[Callable[[Machine], list[str]], tuple[str, str]] = {
    weights_that_are_a_pointer: (
        MODEL,
        "model.safetensors is a pointer of Git LFS, not the file itself (git lfs pull)",
    ),
    old_weights_that_are_a_pointer: (MODEL, "pytorch_model.bin is a pointer of Git LFS"),
    weights_that_are_cut_off: (MODEL, "model.safetensors is cut off: it has 10000 bytes"),
    old_weights_that_are_cut_off: (MODEL, "pytorch_model.bin is no file of torch, or is cut off"),
    weights_of_which_a_part_is_missing: (
        MODEL,
        "model-00002-of-00002.safetensors is not there, which model.safetensors.index.json names",
    ),
    weights_of_another_model: (MODEL, "of shape [64, 128], but by its config.json it is [64, 256]"),
    a_tokenizer_that_is_a_pointer: (MODEL, "tokenizer.json is a pointer of Git LFS"),
    a_config_that_is_no_json: (MODEL, "cannot be read as a model ("),
    a_kind_of_model_that_nobody_knows: (MODEL, "cannot be read as a model ("),
    two_architectures: (MODEL, "Expect only one architecture"),
    quantized_weights_without_their_package: (MODEL, "are quantized, and a package for that is missing (ImportError: "),
    an_attention_that_is_misspelt: (MODEL, "the model cannot be made ("),
    heads_that_ranks_cannot_share: (
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "4: so many ranks share the attention heads of the model, and the model has 2",
    ),
    a_layer_to_wrap_that_the_model_lacks: (MODEL, "the model cannot be made (Exception: Could not find"),
    a_tokenizer_without_template: (
        "actor_rollout_ref.model.custom_chat_template",
        "the agent loop 'single_turn_agent' puts prompts through a chat template, and the model's tokenizer has none",
    ),
    a_filter_that_wants_a_template: (
        "actor_rollout_ref.model.custom_chat_template",
        "null: data.filter_overlong_prompts=true puts",
    ),
    a_tokenizer_without_any_end: (MODEL, "has neither a pad nor an eos token"),
    tokens_that_the_model_lacks: (MODEL, "its tokenizer makes token 259 of a prompt, and the model has 259"),
    a_template_that_refuses_the_prompts: (
        "data.train_files",
        "cannot be put through the chat template (TemplateError: System role",
    ),
    images_that_nobody_looks_at: ("data.train_files", "cannot make prompt 0 (AssertionError: processor is needed"),
    messages_without_content: (
        "data.train_files",
        "16 of the first 16 prompts cannot be put through the chat template",
    ),
    a_filter_that_leaves_nothing: ("data.filter_overlong_prompts", "true: leaves 0 of 16 prompts of data.train_files"),
    a_filter_that_leaves_less_than_a_batch: ("data.filter_overlong_prompts", "true: leaves 7 of 16 prompts"),
    files_that_do_not_go_together: ("data.train_files", "verl's data set cannot read them together (ValueError: "),
    extra_info_of_text: ("data.train_files", "verl's data set cannot make prompt 0 (AttributeError: "),
    lines_of_which_one_is_cut_off: ("data.train_files", "train.jsonl: cannot be read ("),
    lines_without_prompts: ("data.train_files", "cannot make prompt 0 (KeyError: 'prompt')"),
    lines_that_are_too_few: ("data.train_batch_size", "8: the data set has 7 prompts"),
    a_file_of_data_that_is_a_pointer: ("data.train_files", "is a pointer of Git LFS, not the file itself"),
    a_column_with_a_name_of_verls: ("data.train_files", "has a column 'responses', a name that verl's agent loop"),
    prompts_longer_than_the_rollout_takes: ("actor_rollout_ref.rollout.max_model_len", "8: each of the first prompts"),
    an_adapter_that_is_none: ("actor_rollout_ref.model.lora_adapter_path", "the folder has no adapter_config.json"),
    nothing_to_validate_on: ("data.val_files", "there is no prompt, and verl makes a data loader"),
    a_source_that_verl_has_no_score_for: (
        "data.train_files",
        "its data_source is sums, and verl has no score for that",
    ),
    no_ground_truth_in_its_column: (
        "data.train_files",
        "prompt 0 has no data_source, or no reward_model with a ground_truth",
    ),
    parts_that_make_no_batch: ("data.gen_batch_size", "3: does not divide data.train_batch_size=8"),
    rewards_that_nobody_computes: (
        "data.train_files",
        "has no column 'data_source', which verl's reward managers read",
    ),
    a_loop_that_does_not_run: (f"{AGENT}.agent_loop_config_path", "Mine has no method 'run', which verl awaits"),
    a_loop_that_takes_no_more: (f"{AGENT}.agent_loop_config_path", "run() takes no argument 'index'"),
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
    an_experiment_in_a_folder: ("trainer.experiment_name", "sums/first: verl's file logger takes it for a file in"),
    a_checkpoint_that_is_empty: ("trainer.resume_from_path", "has no folder named actor, which verl loads"),
    a_checkpoint_of_more_ranks: ("trainer.resume_from_path", "is of a job of 4 ranks, and this one has 2"),
}
"""Why a job cannot end its first step, as far as models, data and code tell -> the setting, and part of what is."""

CANNOT_START: dict[Callable[[Machine], list[str]], tuple[str, str]] = {
    a_carrier_of_weights_that_is_misspelt: (
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
        "ncclx: verl cannot use it here (Checkpoint engine ncclx not registered, registered backends: ",
    ),
    no_vllm: ("actor_rollout_ref.rollout.name", "vllm: vllm is not installed here"),
    no_such_rollout: ("actor_rollout_ref.rollout.name", "vlllm: "),
    no_megatron: ("actor_rollout_ref.actor.strategy", "megatron: megatron-core is not installed here"),
    no_logger: ("trainer.logger", "clearml: clearml is not installed here"),
    no_cuda: ("trainer.device", "cuda: torch "),
    no_platform: ("VERL_PLATFORM", "not set, but trainer.device=cpu"),
    no_model: ("actor_rollout_ref.model.path", "/nowhere: there is no such folder"),
    a_model_without_weights: ("actor_rollout_ref.model.path", "the folder has no weights"),
    a_model_of_a_hub_that_is_out_of_reach: ("actor_rollout_ref.model.path", "http://127.0.0.1:9 cannot be reached"),
    no_training_file: ("data.train_files", "/nowhere/train.parquet: there is no such file"),
    no_validation_file: ("data.val_files", "/nowhere/val.parquet: there is no such file"),
    a_training_file_that_is_none: ("data.train_files", "cannot be read"),
    too_few_prompts: ("data.train_batch_size", "64: the data set has 16 prompts"),
    another_prompt_column: ("data.train_files", "has no column 'question' (data.prompt_key), only prompt"),
    no_reward_file: ("reward.custom_reward_function.path", "there is no such file"),
    no_reward_function: ("reward.custom_reward_function.path", "has no 'compute_score'"),
    no_such_agent_loop: ("actor_rollout_ref.rollout.agent.default_agent_loop", "mine: no agent loop of this name"),
    a_row_with_another_agent_loop: ("data.train_files", "its column agent_name names mine. Choices: "),
    no_agent_loop_file: ("actor_rollout_ref.rollout.agent.agent_loop_config_path", "there is no such file"),
    an_agent_loop_without_its_module: (
        "actor_rollout_ref.rollout.agent.agent_loop_config_path",
        "_target_: no_such_package.agent.Mine: there is no module 'no_such_package' on Python's path",
    ),
    no_tool: ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "has no 'Hammer'"),
    no_folder_for_the_log: ("VERL_FILE_LOGGER_PATH", "its folder is not there"),
    checkpoints_below_a_file: ("trainer.default_local_dir", "checkpoints is a file"),
    no_checkpoint: ("trainer.resume_from_path", "/nowhere/global_step_7: there is no such folder"),
    no_external_module: ("VERL_USE_EXTERNAL_MODULES", "json,my_modul: there is no module 'my_modul' here"),
    a_logger_without_its_key: ("WANDB_API_KEY", "not set, and there is no key of `wandb login`"),
    no_logger_at_all: ("trainer.logger", "null: has to be set"),
    prompts_of_plain_text: ("data.train_files", "its column 'prompt' holds text, and verl's agent loops take lists"),
    prompts_of_another_form: ("data.train_files", "its column 'prompt' holds lists of objects with from, value, and"),
    no_ground_truth: ("data.train_files", "has no column 'reward_model', which verl's reward managers read"),
    a_folder_of_data: ("data.train_files", "is a folder. Name the files in it: "),
    a_checkpoint_folder_that_is_a_file: ("trainer.default_local_dir", "is a file. Name another folder"),
    a_reward_of_other_arguments: (
        "reward.custom_reward_function.path",
        "compute_score() takes no argument 'data_source': it is called with data_source, solution_str, ground_truth",
    ),
    a_reward_that_imports_what_is_not_there: (
        "reward.custom_reward_function.path",
        "imports 'sympyy', and there is no such module on Python's path",
    ),
    ranks_that_a_row_cannot_be_shared_by: (
        "padding",
        "actor_rollout_ref.actor: 3 ranks compute a row together (tensor, pipeline, context or Ulysses parallel), "
        "which does not divide the job's 2 ranks",
    ),
    an_optimizer_that_verl_asserts_against: ("padding", "AssertionError: assert self.lr_scheduler_type in"),
    fewer_cpus_than_verl_asks_for: (
        "ray_kwargs.ray_init.num_cpus",
        "6: verl asks Ray for at least 7 CPUs (3 for each of 2 ranks, and one)",
    ),
    a_word_for_a_temperature: (
        "actor_rollout_ref.rollout.temperature",
        "hot: a number is needed; verl's own value is 1.0.",
    ),
    a_learning_rate_misspelt: ("actor_rollout_ref.actor.optim.lr", "1e-3x: a number is needed"),
    a_rollout_of_more_devices_than_there_are: (
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "a replica of the rollout takes 8 devices, and the job has",
    ),
    a_word_for_a_number: ("actor_rollout_ref.rollout.n", "one: a whole number is needed"),
    no_prompts: ("padding", "data.train_batch_size=0: must be at least 1"),
    no_such_estimator: ("verl's estimators and losses", "Unknown advantage estimator simply: grop"),
    no_such_policy_loss: ("verl's estimators and losses", "vanila"),
    no_such_kl: ("actor_rollout_ref.actor.kl_loss_type", "low_var: verl has no such KL penalty"),
    no_such_reward_manager: ("reward.reward_manager.name", "nope: no reward manager of this name. Choices: "),
    no_such_object_of_a_reward_manager: ("reward.reward_manager.name", "has no 'naive'"),
    a_ray_cluster_of_another_size: ("ray_kwargs.ray_init.num_cpus", "joins a Ray cluster (10.0.0.1:6379) cannot say"),
    no_such_resume_mode: (
        "trainer.resume_mode",
        "always: verl resumes in no such way. Choices: auto, disable, resume_path",
    ),
    a_latest_checkpoint_of_no_step: ("trainer.default_local_dir", "'seven' is no step. Write the number of a"),
    a_checkpoint_that_is_none: ("trainer.resume_from_path", "not a checkpoint of verl"),
    an_external_module_that_fails: (
        "VERL_USE_EXTERNAL_MODULES",
        "importing 'broken_module' ends with ValueError: boom",
    ),
    no_such_teacher: ("distillation.teacher_models.teacher_model.model_path", "/nowhere/teacher: there is no such"),
    no_such_format_of_numbers: (
        "actor_rollout_ref.actor.fsdp_config.model_dtype",
        "float23: no format of numbers that verl knows. Choose fp32, bf16 or fp16.",
    ),
    lora_on_modules_of_another_model: (
        "actor_rollout_ref.model.target_modules",
        "['query_key_value']: the model has no module of this name. The model has act_fn, ",
    ),
    lora_on_a_pattern_that_no_module_has: (
        "actor_rollout_ref.model.target_modules",
        "q_proj: the model has no module of this name. The model has act_fn, ",
    ),
    lora_that_the_rollout_does_not_take: (
        "actor_rollout_ref.model.lora.merge",
        "False: the rollout 'transformers' takes whole weights, no adapters. Set actor_rollout_ref.model.lora.merge",
    ),
    an_optimizer_that_torch_lacks: (
        "actor_rollout_ref.actor.optim.optimizer",
        "AdamW8bit: torch.optim has no such optimizer",
    ),
    an_optimizer_of_no_module: (
        "actor_rollout_ref.actor.optim.optimizer_impl",
        "bitsandbytes_.optim: there is no such module",
    ),
    one_beta: ("actor_rollout_ref.actor.optim.betas", "[0.9]: must be two numbers"),
    fewer_than_no_loaders: ("data.dataloader_num_workers", "-1: too few. Set it to 0 or more."),
    no_agent_loop_worker: ("actor_rollout_ref.rollout.agent.num_workers", "0: too few. Set it to 1 or more."),
    a_number_in_the_environment: (
        "ray_kwargs.ray_init.runtime_env.env_vars.MY_RETRIES",
        "3: Ray takes texts only. Put it in quotes",
    ),
    a_template_that_is_cut_off: ("actor_rollout_ref.model.custom_chat_template", "no template of Jinja ("),
    flash_attention_on_a_cpu: (
        "actor_rollout_ref.model.override_config.attn_implementation",
        "flash_attention_2: it has no kernels for a CPU. Set it to sdpa.",
    ),
    laps_in_a_file: ("padding.timing_dir", "is a file. Name another folder"),
    a_setting_misspelt: ("overrides", "verl has no such setting. Did you mean data.train_batch_size?"),
    no_rollout_name: ("actor_rollout_ref.rollout.name", "???: has to be set"),
    an_unknown_setting_of_ours: ("overrides", "padding.strateggy: no such setting. Choices: padding.strategy, "),
}
"""Why a job cannot start -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(
    reason, job, tmp_path, monkeypatch, tiny_model
):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    overrides = reason(Machine(tmp_path, monkeypatch, tiny_model))
    setting, told = CANNOT_START[reason]
    found = findings_of(*job, "+padding=prompt", *overrides, platform=os.environ.get("VERL_PLATFORM", ""))
    matter = [finding for finding in found if finding.verdict == "wrong"]
    assert [finding for finding in matter if finding.subject == setting and told in finding.told], matter
    assert not [finding.details for finding in found if finding.details]


@pytest.mark.parametrize("reason", CANNOT_TRAIN, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_train_is_told_with_the_setting_that_is_why(
    reason, composed, tmp_path, monkeypatch, tiny_model
):
    overrides = reason(Machine(tmp_path, monkeypatch, tiny_model))
    setting, told = CANNOT_TRAIN[reason]
    found = contents_of(composed, overrides)
    matter = [finding for finding in found if finding.verdict == "wrong"]
    assert [finding for finding in matter if finding.subject == setting and told in finding.told], matter
    assert not [finding.details for finding in found if finding.details]


def test_a_latest_checkpoint_that_is_not_there_is_warned_of_since_verl_begins_anew(job, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    overrides = [*job, "+padding=prompt", f"trainer.default_local_dir={tmp_path}"]
    (warned,) = [each for each in findings_of(*overrides) if each.verdict == "warning"]
    assert warned.subject == "trainer.default_local_dir"
    assert "names step 7, but there is no global_step_7, so the job begins anew" in warned.told
    (tmp_path / "global_step_7" / "actor").mkdir(parents=True)
    assert {each.verdict for each in findings_of(*overrides)} == {"ok"}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilization=50", "50: a share of a GPU's memory"),
        ("actor_rollout_ref.rollout.dtype=float23", "float23: no format of numbers of the rollout. Choose auto, half"),
    ],
)
def test_a_value_that_vllm_refuses_is_told(override, told, composed):
    found = list(values_for_rollout(with_settings(composed, ["actor_rollout_ref.rollout.name=vllm", override])))
    setting = override.split("=")[0]
    assert [each for each in found if (each.verdict, each.subject) == ("wrong", setting) and told in each.told], found


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.rollout.n=0", "0: too few. Set it to 1 or more."),
        ("actor_rollout_ref.rollout.temperature=-1", "-1: too few. Set it to 0 or more."),
        ("actor_rollout_ref.rollout.top_p=1.2", "1.2: must be above 0 and at most 1"),
        ("actor_rollout_ref.actor.optim.lr=-0.001", "-0.001: too few"),
        ("data.max_response_length=0", "0: too few"),
        ("data.val_batch_size=-1", "-1: too few"),
        ("trainer.total_epochs=0", "0: the job would end before its first step"),
        ("trainer.total_training_steps=0", "0: the job would end before its first step"),
        ("+ray_kwargs.ray_init.runtime_env.working_dir=/nowhere", "/nowhere: there is no such folder, and Ray copies"),
    ],
)
def test_a_value_that_no_job_can_have_is_told(override, told, composed):
    found = list(values_passed_on(with_settings(composed, [override])))
    setting = override.lstrip("+").split("=")[0]
    assert [each for each in found if (each.verdict, each.subject) == ("wrong", setting) and told in each.told], found


@pytest.fixture
def gpus(monkeypatch) -> None:
    """A machine of eight GPUs with all packages, as far as the doctor can see."""
    import torch

    from verl_padding.doctor import packages

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(packages, "is_module", lambda module: True)


ON_GPUS = (
    "trainer.device=cuda",
    "trainer.n_gpus_per_node=8",
    "ray_kwargs.ray_init.num_gpus=null",
    "ray_kwargs.ray_init.num_cpus=null",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.dtype=bfloat16",
)


@pytest.mark.parametrize(
    ("overrides", "matter"),
    [
        ([], []),
        (["trainer.n_gpus_per_node=16"], ["trainer.n_gpus_per_node"]),
        (
            [
                "reward.reward_model.enable=true",
                "reward.reward_model.enable_resource_pool=true",
                "reward.reward_model.nnodes=1",
                "reward.reward_model.n_gpus_per_node=8",
                "reward.reward_model.rollout.name=vllm",
                "reward.reward_model.model_path=${actor_rollout_ref.model.path}",
            ],
            ["trainer.n_gpus_per_node"],
        ),
    ],
    ids=["eight", "sixteen", "eight, and eight of a reward model"],
)
def test_devices_of_all_pools_are_counted(overrides, matter, job, gpus):
    found = findings_of(*job, "+padding=prompt", *ON_GPUS, *overrides, platform="")
    assert [finding.subject for finding in found if finding.verdict == "wrong"] == matter, found


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
        "+padding=prompt",
        f"data.train_files={tmp_path}/part*.parquet",
        "data.train_batch_size=16",
        f"reward.custom_reward_function.path={tmp_path / 'rewards.py'}",
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={tmp_path / 'rewards.py'}",
        "reward.reward_manager.name=Manager",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'agent.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
    )
    assert {finding.verdict for finding in found} == {"ok"}, [each for each in found if each.verdict != "ok"]


def plain_texts_for_a_loop_of_ones_own(machine: Machine) -> list[str]:
    return [*_data(machine, prompts(16, prompt=["1+1"] * 16)), *machine.loop(LOOP + SCORED)]


def no_truth_where_the_loop_scores(machine: Machine) -> list[str]:
    return [*_data(machine, prompts(16)[["prompt"]]), *machine.loop(LOOP + SCORED)]


def no_truth_where_the_loop_may_score(machine: Machine) -> list[str]:
    text = LOOP.replace("import AgentLoopBase", "import AgentLoopBase as Base").replace("AgentLoopBase)", "Base)")
    return [*_data(machine, prompts(16)[["prompt"]]), *machine.loop(text + "        return await episode(**kwargs)\n")]


def no_template_where_the_loop_brings_one(machine: Machine) -> list[str]:
    text = "        self.tokenizer.apply_chat_template(kwargs['raw_prompt'], chat_template=MINE)\n"
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + text + SCORED)]


def no_template_where_the_loop_looks_for_one(machine: Machine) -> list[str]:
    text = "        has = getattr(self.tokenizer, 'chat_template', None)\n"
    text += "        ids = self.tokenizer.apply_chat_template(kwargs['raw_prompt']) if has else [1]\n"
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + text + SCORED)]


def no_template_where_another_class_applies_one(machine: Machine) -> list[str]:
    other = "\nclass Judge:\n    def ask(self):\n        return self.tokenizer.apply_chat_template([])\n"
    judge = "        self.judge_tokenizer.apply_chat_template(kwargs['raw_prompt'])\n"
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + judge + SCORED + other)]


def no_template_where_the_job_brings_one(machine: Machine) -> list[str]:
    template = "{{ messages[0].content }}"
    return [*a_tokenizer_without_template(machine), f'actor_rollout_ref.model.custom_chat_template="{template}"']


def a_loop_that_extends_verls(machine: Machine) -> list[str]:
    text = "from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop\n"
    return machine.loop(f"{text}\nclass Mine(SingleTurnAgentLoop):\n    greeting = 'hi'\n")


def a_loop_for_each_prompt(machine: Machine) -> list[str]:
    data = prompts(16, agent_name=["mine"] * 16).drop(columns=["reward_model"])
    overrides = machine.loop(LOOP + SCORED)
    return [*_data(machine, data), f"data.val_files={machine.folder}/data.parquet", overrides[0]]


def other_columns_in_each_file(machine: Machine) -> list[str]:
    prompts(8, level=[1] * 8).to_parquet(machine.folder / "a.parquet")
    prompts(8, topic=["sums"] * 8, level=[None] * 8).to_parquet(machine.folder / "b.parquet")
    return [f"data.train_files={machine.folder}/*.parquet"]


def lines_of_json(machine: Machine) -> list[str]:
    lines = prompts(16).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', lines)}"]


def one_array_of_json(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.file('train.json', prompts(16).to_json(orient='records'))}"]


def lines_that_name_their_loop(machine: Machine) -> list[str]:
    data = prompts(16, agent_name=["mine"] * 16, prompt=["1+1"] * 16).drop(columns=["reward_model"])
    lines = machine.file("train.jsonl", data.to_json(orient="records", lines=True))
    return [f"data.train_files={lines}", f"data.val_files={lines}", machine.loop(LOOP + SCORED)[0]]


def another_loop_for_files_that_are_never_used(machine: Machine) -> list[str]:
    prompts(16, agent_name=["nobodys"] * 16).to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet", "trainer.val_before_train=false", "trainer.test_freq=-1"]


def a_default_loop_that_no_prompt_takes(machine: Machine) -> list[str]:
    data = prompts(16, agent_name=["mine"] * 16)
    return [
        *_data(machine, data),
        f"data.val_files={machine.folder}/data.parquet",
        machine.loop(LOOP + SCORED)[0],
        f"{AGENT}.default_agent_loop=nobodys",
    ]


def many_files(machine: Machine) -> list[str]:
    for number in range(20):
        prompts(100).to_parquet(machine.folder / f"{number}.parquet")
    return [f"data.train_files={machine.folder}/*.parquet", "data.filter_overlong_prompts=true"]


def a_filter_that_leaves_enough(machine: Machine) -> list[str]:
    data = prompts(16, prompt=[MESSAGES] * 9 + [[{"role": "user", "content": "1+" * 99}]] * 7)
    val = f"data.val_files={machine.folder}/data.parquet"
    return [*_data(machine, data), val, "data.filter_overlong_prompts=true", "data.max_prompt_length=50"]


def a_filter_that_leaves_out_what_the_template_refuses(machine: Machine) -> list[str]:
    data = prompts(16, prompt=[MESSAGES] * 9 + [[{"role": "user", "content": None}]] * 7)
    val = f"data.val_files={machine.folder}/data.parquet"
    return [*_data(machine, data), val, "data.filter_overlong_prompts=true"]


def a_reward_that_waits(machine: Machine) -> list[str]:
    text = "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, k=1):\n    return k\n"
    return [
        *_data(machine, prompts(16, data_source=["sums"] * 16)),
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


def weights_in_parts(machine: Machine) -> list[str]:
    import transformers

    folder = machine.model()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return _with_model(folder)


def weights_of_an_old_torch(machine: Machine) -> list[str]:
    import torch
    from safetensors.torch import load_file

    folder = machine.model()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return _with_model(folder)


def a_tool_of_verls(machine: Machine) -> list[str]:
    schema = "{type: function, function: {name: add, description: adds, parameters: {type: object, properties: {}}}}"
    text = '@function_tool(schema=ADD)\ndef add(a, b): ...\n\n@function_tool\ndef now() -> str:\n    """The time."""\n'
    path = machine.file("tools.py", "from verl.tools.function_tool import function_tool\n\n" + text)
    return [
        *_tools(machine, schema=f"  tool_schema: {schema}\n"),
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={path}",
        f"{AGENT}.default_agent_loop=tool_agent",
    ]


def a_checkpoint_of_as_many_ranks(machine: Machine) -> list[str]:
    return _checkpoint(machine, *(f"actor/model_world_size_2_rank_{rank}.pt" for rank in range(2)))


def settings_of_verls_examples(machine: Machine) -> list[str]:
    """Those of its scripts in examples/ that are about models, data and rewards."""
    val = "actor_rollout_ref.rollout.val_kwargs"
    return [
        "data.filter_overlong_prompts=true",
        "data.truncation=error",
        "data.shuffle=false",
        "data.return_raw_chat=true",
        "actor_rollout_ref.model.trust_remote_code=true",
        "actor_rollout_ref.model.use_shm=true",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora.merge=true",
        "actor_rollout_ref.model.target_modules=all-linear",
        "actor_rollout_ref.rollout.top_k=-1",
        f"{val}.do_sample=true",
        f"{val}.temperature=1.0",
        f"{val}.top_p=0.7",
        "reward.reward_manager.name=dapo",
        "trainer.total_epochs=15",
    ]


def validation_files_that_are_never_used(machine: Machine) -> list[str]:
    prompts(16, prompt=[[{"role": "user", "content": None}]] * 16).to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet", "trainer.val_before_train=false", "trainer.test_freq=-1"]


def loops_with_rewards_of_their_own(machine: Machine) -> list[str]:
    return [*machine.loop(LOOP + SCORED), "reward.num_workers=0"]


LEGAL: list[Callable[[Machine], list[str]]] = [
    plain_texts_for_a_loop_of_ones_own,
    no_truth_where_the_loop_scores,
    no_truth_where_the_loop_may_score,
    no_template_where_the_loop_brings_one,
    no_template_where_the_loop_looks_for_one,
    no_template_where_another_class_applies_one,
    no_template_where_the_job_brings_one,
    a_loop_that_extends_verls,
    a_loop_for_each_prompt,
    other_columns_in_each_file,
    lines_of_json,
    one_array_of_json,
    lines_that_name_their_loop,
    another_loop_for_files_that_are_never_used,
    a_default_loop_that_no_prompt_takes,
    many_files,
    a_filter_that_leaves_enough,
    a_filter_that_leaves_out_what_the_template_refuses,
    a_reward_that_waits,
    a_package_that_imports_its_own,
    weights_in_parts,
    weights_of_an_old_torch,
    a_tool_of_verls,
    a_checkpoint_of_as_many_ranks,
    settings_of_verls_examples,
    validation_files_that_are_never_used,
    loops_with_rewards_of_their_own,
]


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_job_of_a_rare_kind_is_not_called_wrong(kind, composed, tmp_path, monkeypatch, tiny_model):
    found = contents_of(composed, kind(Machine(tmp_path, monkeypatch, tiny_model)))
    assert {finding.verdict for finding in found} == {"ok"}, [each for each in found if each.verdict != "ok"]
    assert [each for each in found if each.subject == "data.train_files" and each.told.endswith(" tried")]


def files_that_are_elsewhere(machine: Machine) -> list[str]:
    return ["data.train_files=hdfs://data/train.parquet", *machine.loop(LOOP + SCORED)]


def a_large_array_of_json(machine: Machine) -> list[str]:
    text = prompts(1000, notes=["1" * 17_000] * 1000).to_json(orient="records")
    assert len(text) > MOST_BYTES
    return [f"data.train_files={machine.file('train.json', text)}"]


def a_large_file_of_other_types_than_a_small_one(machine: Machine) -> list[str]:
    for name, levels in (("a", ["easy"] * 16), ("b", [{"of": "1" * 17_000}] * 1000)):
        lines = prompts(len(levels), level=levels).to_json(orient="records", lines=True)
        machine.file(f"{name}.jsonl", lines)
    return [f"data.train_files={machine.folder}/*.jsonl"]


def a_manager_of_loops_of_ones_own(machine: Machine) -> list[str]:
    machine.loop("class Manager: ...\n")
    return [
        *_data(machine, prompts(16, responses=["2"] * 16)),
        f"{AGENT}.agent_loop_manager_class=loops_of_{machine.folder.name}.Manager",
    ]


def a_module_that_may_register_anything(machine: Machine) -> list[str]:
    machine.loop("")
    return [
        f"actor_rollout_ref.model.external_lib=loops_of_{machine.folder.name}",
        "actor_rollout_ref.rollout.multi_turn.format=mine",
        *_data(machine, prompts(16, agent_name=["tool_agent"] * 8 + ["mine"] * 8)),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        files_that_are_elsewhere,
        a_large_array_of_json,
        a_large_file_of_other_types_than_a_small_one,
        a_manager_of_loops_of_ones_own,
        a_module_that_may_register_anything,
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_cannot_be_known_is_not_called_wrong(kind, composed, tmp_path, monkeypatch, tiny_model):
    found = contents_of(composed, kind(Machine(tmp_path, monkeypatch, tiny_model)))
    assert {finding.verdict for finding in found} == {"ok", "not looked at"}, found


def test_a_loop_that_seems_to_want_a_template_is_warned_of(composed, tmp_path, monkeypatch, tiny_model):
    found = contents_of(composed, a_loop_that_wants_a_template(Machine(tmp_path, monkeypatch, tiny_model)))
    (warned,) = [each for each in found if each.verdict != "ok"]
    assert (warned.subject, warned.verdict) == ("actor_rollout_ref.model.custom_chat_template", "warning")
    assert "'mine' seems to put prompts through a chat template" in warned.told


def test_a_model_whose_prompts_verl_writes_itself_needs_no_template(composed):
    from verl.utils.tokenizer.deepseek import EOS_TOKEN

    for kind, told in (("deepseek_v4", []), ("qwen2", ["wrong"])):
        tokenizer = make_byte_tokenizer([EOS_TOKEN])
        tokenizer.chat_template = None
        typed = SimpleNamespace(tokenizer=tokenizer, processor=None, hf_config=SimpleNamespace(model_type=kind))
        found = template_of_job(composed, LoadedModel(typed), loops_of_job(composed))
        assert [each.verdict for each in found] == told


def test_a_damaged_page_is_told_with_its_file(composed, tmp_path):
    file = tmp_path / "data.parquet"
    prompts(16).to_parquet(file)
    damaged = bytearray(file.read_bytes())
    damaged[4:200] = bytes(196)
    file.write_bytes(damaged)
    found = contents_of(composed, [f"data.train_files={file}"])
    (told,) = [each for each in found if each.verdict != "ok"]
    assert (told.subject, told.verdict, told.details) == ("data.train_files", "wrong", "")
    assert f"{file}: cannot be read (" in told.told


def test_a_full_disk_is_no_fault_of_the_files(composed, monkeypatch):
    def full(*_given, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    (told,) = [each for each in contents_of(composed, []) if each.verdict != "ok"]
    assert told.verdict == "not looked at"
    assert "No space left on device" in told.told


def test_one_prompt_that_fails_before_the_time_is_up_does_not_stand_for_all(composed, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_padding.doctor.chat_templates.SECONDS", 0)
    empty = [{"role": "user", "content": None}]
    prompts(16, prompt=[empty] + [MESSAGES] * 15).to_parquet(tmp_path / "data.parquet")
    found = contents_of(composed, [f"data.train_files={tmp_path}/data.parquet"])
    matter = {each.subject: each for each in found if each.verdict != "ok"}
    assert [each.verdict for each in matter.values()] == ["warning"], matter
    assert "1 of the first 1 prompt cannot be put" in matter["data.train_files"].told


def test_prompts_with_images_are_tried_and_nothing_is_fetched(composed, tmp_path_factory, tmp_path):
    pytest.importorskip("torchvision")
    from PIL import Image

    model = make_tiny_model("qwen3_vl", tmp_path_factory.mktemp("seeing"))
    Image.new("RGB", (32, 32)).save(tmp_path / "cat.png")
    asked = [[{"role": "user", "content": "<image>What is it?"}]] * 16

    def matter(image: str, *overrides: str) -> list[tuple[str, str, str]]:
        prompts(16, prompt=asked, images=[[image]] * 16).to_parquet(tmp_path / "data.parquet")
        found = contents_of(composed, [f"{MODEL}={model}", f"data.train_files={tmp_path}/data.parquet", *overrides])
        assert [each for each in found if each.subject == "model"], found
        return [(each.subject, each.verdict, each.told) for each in found if each.verdict != "ok"]

    there = str(tmp_path / "cat.png")
    assert matter(there) == []
    assert matter("http://127.0.0.1:9/cat.png") == []
    ((setting, verdict, told),) = matter("/nowhere/cat.png")
    assert (setting, verdict) == ("data.train_files", "warning")
    assert "an image cannot be read (FileNotFoundError" in told
    ((setting, verdict, told),) = matter(there, "data.filter_overlong_prompts=true")
    assert (setting, verdict) == ("data.filter_overlong_prompts", "not looked at")


def test_datasets_is_left_as_it_was_and_asks_no_hub(composed, monkeypatch):
    import datasets.config

    before, counts = vars(datasets.config).copy(), []
    real = datasets.load_dataset
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *given, **named: counts.append(datasets.config.HF_UPDATE_DOWNLOAD_COUNTS) or real(*given, **named),
    )
    contents_of(composed, [])
    assert counts
    assert not any(counts)
    assert vars(datasets.config) == before


def test_what_some_prompts_are_is_warned_of_and_the_job_can_start(composed, tmp_path):
    long, empty = [{"role": "user", "content": "1+" * 99}], [{"role": "user", "content": None}]
    prompts(16, prompt=[MESSAGES] * 10 + [long] * 4 + [empty] * 2).to_parquet(tmp_path / "data.parquet")
    found = contents_of(composed, [f"data.train_files={tmp_path}/data.parquet", "data.max_prompt_length=64"])
    warned = {each.subject: each.told for each in found if each.verdict == "warning"}
    assert "2 of the first 16 prompts cannot be put through the chat template" in warned["data.train_files"]
    assert "64: 4 of the first 16 prompts" in warned["data.max_prompt_length"]
    assert not [each for each in found if each.verdict == "wrong"], found


def test_code_of_the_users_is_not_run_though_the_model_and_the_prompts_are_read(
    composed, tmp_path, monkeypatch, tiny_model
):
    machine = Machine(tmp_path, monkeypatch, tiny_model)
    ends = "raise SystemExit('run')\n"
    (tmp_path / "data.py").write_text("from verl.utils.dataset.rl_dataset import RLHFDataset as Mine\n" + ends)
    (tmp_path / "tools.py").write_text(ends)
    overrides = [
        *machine.loop(LOOP + SCORED + ends),
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
    ]
    found = contents_of(composed, overrides)
    assert {each.verdict for each in found} == {"ok"}, found
    own = [f"data.custom_cls.path={tmp_path / 'data.py'}", "data.custom_cls.name=Mine"]
    left = [each for each in contents_of(composed, [*overrides, *own]) if each.verdict != "ok"]
    assert [(each.subject, each.verdict) for each in left] == [("data.custom_cls.path", "not looked at")]


def test_a_hub_that_is_busy_is_not_taken_for_one_without_the_model(monkeypatch):
    from verl_padding.doctor.models import Hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for code, told in ((404, "the hub has none for you"), (503, "cannot be reached (HTTP 503)")):
        monkeypatch.setattr(Hub, "_ask", lambda self, name, code=code: code)
        finding = Hub().finding("actor_rollout_ref.model.path", "some/model")
        assert finding.verdict == "wrong"
        assert told in finding.told
    monkeypatch.setattr(Hub, "_ask", lambda self, name: 200)
    assert Hub().finding("actor_rollout_ref.model.path", "some/model").verdict == "ok"


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


def test_verls_loggers_are_known():
    from verl.utils.tracking import Tracking

    from verl_padding.doctor.packages import LOGGERS

    assert set(LOGGERS) == {*Tracking.supported_backend, "tracking"}


def test_a_model_that_is_not_here_is_told_once_though_verls_check_of_a_critic_loads_it_too(job):
    found = findings_of(*job, "+padding=prompt", "algorithm.adv_estimator=gae", "critic.model.path=/nowhere")
    assert [finding.subject for finding in found if finding.verdict == "wrong"] == ["critic.model.path"]
    assert [finding.subject for finding in found if finding.verdict == "not looked at"] == ["verl's own check"]


def test_a_config_group_that_is_not_there_is_told_with_its_choices_and_no_search_path(job):
    (told,) = [finding.told for finding in findings_of(*job, "+padding=promt") if finding.verdict == "wrong"]
    assert "Could not find 'padding/promt' Available options in 'padding': " in told
    assert "provider" not in told


def test_a_job_that_can_start_has_nothing_wrong_and_nothing_to_be_warned_of(job):
    found = findings_of(*job, "+padding=prompt", "algorithm.adv_estimator=gae")
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
         "vproj: the model has no such module, the others are adapted. The model has act_fn, "),
        (["actor_rollout_ref.model.custom_chat_template=a.jinja"], "actor_rollout_ref.model.custom_chat_template",
         "a.jinja: a text without any place for messages."),
        (["custom_reward_function.path=mine.py"], "custom_reward_function.path",
         "mine.py: has no effect: verl.trainer.main_ppo reads reward.custom_reward_function.path"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_warned_of_and_the_job_can_start(overrides, setting, told, job):
    found = findings_of(*job, "+padding=prompt", *overrides)
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


def test_the_command_takes_hydras_options_and_tells_all_as_json(job, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - _self_\ntrainer:\n  logger: [sand]\n")
    code, said = run_doctor("-cd", str(tmp_path), "--config-name", "mine", "--json", *job, "trainer.logger=[rock]")
    told = json.loads(said)
    assert (code, told["ok"]) == (1, False)
    findings = [finding for look in told["looks"] for finding in look["findings"]]
    (matter,) = [finding for finding in findings if finding["verdict"] == "wrong"]
    assert matter["subject"] == "trainer.logger"
    assert matter["told"].startswith("rock: verl has no logger of this name. Choices: console, file, wandb")


@pytest.mark.parametrize("padding", [(), ("+padding=prompt",)], ids=["verl's own", "padded"])
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


def test_a_group_that_hydra_does_not_find_is_no_valid_job(job):
    code, said = run_doctor(*job, "+padding=prompt", before=BREAK_HYDRA_HOOK)
    assert code == 1
    assert "config groups: failed" in said


def test_a_trainer_that_nobody_knows_is_refused_without_the_flag_too(job):
    code, said = diagnose_here(*job, "trainer.v1.trainer_mode=sycn")
    assert code == 1
    assert "trainer.v1.trainer_mode='sycn': Unknown trainer" in said


def test_a_padded_trainer_is_told_as_one_without_the_flag_too(job):
    code, said = diagnose_here(*job, "trainer.v1.trainer_mode=padded_sync")
    assert code == 0, said
    assert "padded_sync, by PaddedTrainerSync" in said
    assert "4 optimizer steps per batch" in said


@pytest.mark.parametrize("broken", ["wrapt", "verl_padding.verl_job.job_reader"])
def test_every_table_is_told_where_the_plugin_is_broken_and_the_job_asks_for_it(broken, job):
    code, said = run_doctor(*job, "+padding=prompt", before=f"import sys; sys.modules[{broken!r}] = None\n")
    assert code == 1
    for told in ("versions", "plug-in", "TransferQueue", "entry point", "Traceback", f"import of {broken} halted"):
        assert told in said


def test_ray_is_not_started(job):
    before = "import ray\ndef no(*a, **k): raise AssertionError('Ray was started')\nray.init = no\n"
    code, said = run_doctor(*job, "+padding=prompt", before=before)
    assert code == 0, said


def test_a_narrow_terminal_breaks_no_key(job):
    key = "actor_rollout_ref.actor.ppo_micro_batch_size"
    console = Console(width=80, record=True, file=StringIO())
    assert diagnose(JobArguments(overrides=(*job, f"{key}=4")), console=console) == 0
    said = console.export_text()
    assert f"{key}=4: has no effect" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("engine", ["megatron", "veomni", "torchtitan"])
def test_a_job_of_another_engine_is_looked_at_to_its_end(engine, job):
    found = findings_of(*job, "+padding=prompt", f"model_engine={engine}")
    assert not [finding.subject for finding in found if finding.told == "could not be looked at"]
    subjects = {finding.subject for finding in found}
    assert subjects >= {"actor_rollout_ref.actor.strategy", "data.train_batch_size", "verl's trainer"}


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        (None, "veomni: veomni is not installed here. In an environment of its own: pip install --no-deps veomni=="),
        ("9.9", "veomni: veomni 9.9: on a CPU, parts of it are replaced by others that were written for "),
        (engines_on_cpu.TRIED["veomni"]["veomni"], "veomni"),
    ],
)
def test_veomni_on_a_cpu_is_looked_for_and_its_version_is_one_that_was_tried(installed, told, job, monkeypatch):
    is_module = packages.is_module
    monkeypatch.setattr(packages, "is_module", lambda name: bool(installed) if name == "veomni" else is_module(name))
    monkeypatch.setattr(engines_on_cpu, "version", lambda package: installed)
    on_veomni = ["+local=cpu_veomni" if override.startswith("+local=") else override for override in job]
    found = {finding.subject: finding for finding in findings_of(*on_veomni, "+padding=prompt")}
    finding = found["actor_rollout_ref.actor.strategy"]
    assert finding.told.startswith(told)
    assert finding.verdict == ("ok" if told == "veomni" else "wrong")
    assert found["engine of the actor"].told == "veomni, 2 ranks"
