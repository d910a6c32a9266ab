"""``verl-padding doctor``: what is in, what is not, whether a job can run; in processes of its own."""

import os
import subprocess
import sys
from importlib.metadata import requires

import pytest
from rich.console import Console

from verl_padding.cli import doctor
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.plan import STRATEGIES
from verl_padding.verl_job.known_verl import KNOWN_VERL

BREAK_HYDRA_HOOK = "import sys; sys.modules['verl_padding.entry.hydra_search_path'] = None\n"
BREAK_TRAINERS = "import sys; sys.modules['verl_padding.trainer.mixin'] = None\n"
NO_ENTRY_POINT = (
    "import importlib.metadata as m; real = m.entry_points\n"
    "m.entry_points = lambda **kw: [e for e in real(**kw) if e.name != 'verl_padding']\n"
)


def run_doctor(*overrides: str, before: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and everything that is said, with some Python before it starts."""
    code = f"{before}import sys; sys.argv[0] = 'verl-padding'; from verl_padding.cli.app import app; app()"
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [sys.executable, "-c", code, "doctor", *overrides]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    """Overrides of a job that can run."""
    folder = tmp_path_factory.mktemp("job")
    model = make_tiny_model("qwen2", folder)
    (folder / "train.parquet").touch()
    return [
        "+local=cpu",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
    ]


def test_where_all_is_well_every_fixed_package_is_listed_with_what_is_supported():
    code, said = run_doctor()
    assert code == 0, said
    for package in doctor.STACK:
        (line,) = [line for line in said.splitlines() if f" {package} " in line]
        assert "ok" in line
        (wanted,) = [
            each for each in requires("verl_padding") or [] if each.startswith(package) and "extra" not in each
        ]
        assert any(part in line for part in wanted.removeprefix(package).split(",")), (wanted, line)
    for found in ("verl_padding.plugin", "registered", "found by Hydra", "Nothing is wrong"):
        assert found in said


def test_a_version_that_is_not_supported_is_named_with_the_one_that_is(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: {"verl": "0.8.0", "ray": None}.get(name, "99.0"))
    findings = {finding.subject: finding for finding in doctor.versions()}
    assert not findings["verl"].ok
    assert findings["verl"].found == "0.8.0"
    assert "0.9.1" in findings["verl"].wanted
    assert findings["verl"].reason.startswith("pip install 'verl")
    assert findings["ray"].found == "missing"
    assert not findings["wrapt"].ok, "a package that is not always shown is, where it does not fit"


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
    console = Console(width=200, record=True)
    code = doctor.diagnose(overrides, config_name="ppo_trainer", console=console)
    return code, console.export_text()


def test_a_job_that_can_run_is_told_in_words(job):
    code, said = diagnose_here(*job, "+padding=prompt")
    assert code == 0, said
    assert "sync, by PaddedTrainerSync" in said
    assert "prompt, 8 prompts x 4 sessions per batch" in said
    assert "4 optimizer steps per batch, 2 data-parallel ranks" in said
    assert "verl's own checks" in said


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
    assert "Nothing is wrong, but the job trains without padding." in said


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("padding.strategy=promt", f"padding.strategy='promt': not a choice. Choices: {', '.join(STRATEGIES)}."),
        ("actor_rollout_ref.rollout.m=4", "Could not override 'actor_rollout_ref.rollout.m'"),
        ("data.val_files=/nowhere/val.parquet", "data.val_files: /nowhere/val.parquet"),
        ("trainer.v1.trainer_mode=mine", "trainer.v1.trainer_mode='mine': Unknown trainer 'mine'"),
        ("actor_rollout_ref.rollout.mode=sync", "verl's rollout: refused"),
        ("+trainer.v1.sync.parameter_sync_step=2", "trainer.v1.sync.parameter_sync_step=2: this mode's rollout sleeps"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "prompts_per_mini_batch=16 of 'actor' does not divide prompts=8",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_the_reason(job, override, told):
    code, said = diagnose_here(*job, "+padding=prompt", override)
    assert code == 1
    assert told in said.replace("\n", " ") or told in said, said


@pytest.mark.parametrize("padding", [(), ("+padding=prompt",)], ids=["verl's own", "padded"])
def test_what_verls_trainer_would_refuse_is_told_with_and_without_the_flag(job, padding):
    separate = [
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "trainer.v1.separate_async.parameter_sync_step=4",
    ]
    code, said = diagnose_here(*job, *separate, *padding)
    assert code == 0, said
    code, said = diagnose_here(*job, *separate, *padding, "data.train_batch_size=16")
    assert code == 1
    assert "verl's trainer: refused" in said
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
