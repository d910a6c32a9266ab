"""Folders of somebody else: no command runs code of theirs, unless the command line says so."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.cli.test_plan import write_lines
from verl_padding.cli.app import app
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.record.run_files import CONFIG

TAKEN = "taken"
"""File that hostile code writes."""
ROWS = [{"prompt": f"p{row // 4}", "session": row % 4, "tokens": 10 + row} for row in range(32)]
AUTO_MAP = {"AutoConfig": "conf.Hostile", "AutoTokenizer": ["conf.Hostile", "conf.Hostile"]}


class Pickled:
    """What a pickle can do."""

    def __init__(self, taken):
        self.taken = taken

    def __reduce__(self):
        return os.mkdir, (str(self.taken),)


@pytest.fixture
def hostile(job, tiny_model, tmp_path, monkeypatch):
    """The folder of a run, with its model, each file of which would write TAKEN if it ran."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    run, model, taken = tmp_path / "run", tmp_path / "run" / "model", tmp_path / TAKEN
    shutil.copytree(tiny_model, model)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(values | {"auto_map": AUTO_MAP}))
    code = (
        f"open({str(taken)!r}, 'w').close()\n"
        "from transformers import Qwen2Config\n"
        "class Hostile(Qwen2Config): pass\n"
    )
    for name in ("conf.py", "modeling.py", "tokenization.py"):
        (model / name).write_text(code)
    for name in ("pytorch_model.bin", "tokenizer.pkl", "training_args.bin"):
        (model / name).write_bytes(pickle.dumps(Pickled(taken)))
    # Where the user may be: modules that packages look for.
    for name in ("hydra_plugins", "flash_attn", "apex", "vllm"):
        (run / name).mkdir()
        (run / name / "hostile.py").write_text(code)
        if name != "hydra_plugins":
            (run / name / "__init__.py").write_text(code)
    write_config(run, job, f"actor_rollout_ref.model.path={model}")
    write_lines(run / "rows.jsonl", ROWS)
    (run / "steps").mkdir()
    write_lines(run / "steps" / "3.jsonl", ROWS)
    return run


def target(run):
    """What Hydra would make: a file."""
    return {"_target_": "logging.FileHandler", "filename": str(run.parent / TAKEN)}


def write_config(run, job, *overrides, **values):
    """The config that the run has left, which trusts its model."""
    padding = ("+padding=rows", "padding.cost_model=model")
    config = compose_job(JobArguments(overrides=(*job, *padding, *overrides)))
    OmegaConf.update(config, "actor_rollout_ref.model.trust_remote_code", True)
    for name, value in values.items():
        OmegaConf.update(config, name.replace("__", "."), value, force_add=True)
    path = run / CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, path)
    return path


def result_of(run, *arguments):
    """The result of a command, which ran nothing of the folder and ended without a traceback."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert not (run.parent / TAKEN).exists()
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def taken(run):
    path = run.parent / TAKEN
    found = path.exists()
    path.unlink(missing_ok=True)
    return found


BUDGET = ("--budget", 100)


@pytest.mark.parametrize("name", ["rows.jsonl", "steps/3.jsonl", "steps"])
def test_the_config_of_a_run_is_data_and_is_named(name, hostile, tmp_path):
    result = result_of(hostile, "plan", "--json", hostile / name, *BUDGET)
    assert json.loads(result.stdout)["strategy"] == "rows"
    assert str(hostile / CONFIG) in result.stderr


def test_what_a_command_line_trusts_is_run(hostile, job):
    trusting = [f"actor_rollout_ref.model.path={hostile / 'model'}", "+padding=rows"]
    trusting.append("actor_rollout_ref.model.trust_remote_code=true")
    CliRunner().invoke(app, ["plan", str(hostile / "rows.jsonl"), "--", *job, *trusting])
    assert taken(hostile)
    instantiate(target(hostile))
    assert taken(hostile)


def test_classes_of_a_run_are_those_of_verl(hostile, job):
    path = f"actor_rollout_ref.model.path={hostile / 'model'}"
    plain = result_of(hostile, "plan", "--json", hostile / "rows.jsonl", *BUDGET)
    for place in ("actor_rollout_ref__actor__optim__betas", "actor_rollout_ref__actor__more"):
        write_config(hostile, job, path, **{place: [target(hostile)]})
        result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    targets = {"actor_rollout_ref__actor___target_": "logging.FileHandler"}
    write_config(hostile, job, path, **targets, hydra__searchpath=["pkg://flash_attn"])
    result = result_of(hostile, "plan", "--json", hostile / "rows.jsonl", *BUDGET)
    assert json.loads(result.stdout)["steps"] == json.loads(plain.stdout)["steps"]


MAKES = "${{oc.create:{{_target_: logging.FileHandler, filename: {taken}}}}}"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("actor_rollout_ref__actor__optim", MAKES),
        ("trainer__more", MAKES),
        ("trainer__more", "${{oc.decode:'{{a: 1}}'}}"),
        ("trainer__more", "${{${{trainer.project_name}}:{taken}}}"),
    ],
)
def test_a_runs_config_resolves_to_nothing_that_acts(value, place, hostile, job):
    made = value.format(taken=hostile.parent / TAKEN)
    path = write_config(hostile, job)
    config = OmegaConf.load(path)
    OmegaConf.update(config, place.replace("__", "."), made, force_add=True)
    OmegaConf.save(config, path)
    result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert str(path) in line


def fetched_by_a_shell(run):
    """A path that verl copies by a shell command."""
    return f"hdfs://a;touch {run.parent / TAKEN};echo"


def test_the_engine_of_a_run_is_no_file_of_it(hostile, job):
    evil = f"{'../' * 20}{hostile}/evil"
    acts = {"optim": {"override_optimizer_config": {"x": target(hostile)}}}
    files = {"evil": {"model_engine": evil}}
    for role in ("actor", "ref", "critic"):
        files[f"evil_{role}"] = {"defaults": [f"/{role}/dp_{role}@_here_", "_self_"]}
    files["evil_actor"] |= acts
    for name, values in files.items():
        header = "# @package _global_\n" if name == "evil" else ""
        (hostile / f"{name}.yaml").write_text(header + OmegaConf.to_yaml(values))
    write_config(hostile, job, model_engine=evil)
    result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    assert result.exit_code == 1
    assert "model_engine" in result.stderr


def test_the_models_of_a_run_are_folders_or_are_not_opened(hostile, job):
    of_critic = {"path": str(hostile / "model"), "hf_config_path": fetched_by_a_shell(hostile)}
    estimator, cost_model = (
        {"algorithm__adv_estimator": "gae"},
        {"padding__cost_model": "attention"},
    )
    write_config(hostile, job, critic__model=of_critic, **estimator, **cost_model)
    assert result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET).exit_code == 0
    write_config(hostile, job, critic__model=of_critic, **estimator)
    result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    assert result.exit_code == 1
    assert "critic.model" in result.stderr


def test_a_run_has_verls_classes_in_verls_places_alone(hostile, job):
    path = write_config(hostile, job, "actor_rollout_ref.model.path=" + str(hostile / "model"))
    config = OmegaConf.load(path)
    config.actor_rollout_ref.model.tokenizer_path = fetched_by_a_shell(hostile)
    config.actor_rollout_ref.actor.optim.betas = ["${actor_rollout_ref.model}"]
    OmegaConf.save(config, path)
    result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    assert result.exit_code == 1
    assert "betas" in result.stderr


def test_the_doctor_opens_folders_alone_of_a_jobs_file(hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    config = OmegaConf.load(hostile / CONFIG)
    config.actor_rollout_ref.model.tokenizer_path = fetched_by_a_shell(hostile)
    OmegaConf.save(config, hostile / CONFIG)
    of_config = ("--config-path", (hostile / CONFIG).parent, "--config-name", "config")
    result_of(hostile, "doctor", *of_config)


def test_files_on_a_search_path_of_the_command_line_are_data(hostile, job, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    model = {"path": str(hostile / "model"), "trust_remote_code": True}
    acts = {"actor": {"optim": {"override_optimizer_config": {"x": target(hostile)}}}}
    (hostile / "recipe").mkdir()
    for name, role in {"trusts": {"model": model}, "acts": acts}.items():
        text = OmegaConf.to_yaml({"actor_rollout_ref": role})
        (hostile / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    others = [each for each in job if "model.path" not in each]
    for name in ("trusts", "acts"):
        typed = (f"hydra.searchpath=[file://{hostile}]", f"+recipe={name}", "+padding=rows")
        result = result_of(hostile, "doctor", *others, *typed)
        assert ("logging.FileHandler" in "".join(result.output.split())) == (name == "acts")
        assert ("trust_remote_code=True" in result.stderr) == (name == "trusts")


def test_a_config_above_is_of_steps_and_rollouts_alone(hostile):
    (hostile / "mine").mkdir()
    rows = write_lines(hostile / "mine" / "rows.jsonl", ROWS)
    result = result_of(hostile, "plan", "--json", rows, *BUDGET)
    assert str(hostile / CONFIG) not in result.stderr
    assert json.loads(result.stdout)["strategy"] == "prompt"


def test_no_network_is_asked_for_the_model_of_a_run(hostile, job, monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    write_config(hostile, job, "actor_rollout_ref.model.path=someone/model")
    result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    assert result.exit_code == 1
    assert "someone/model" in result.stderr
    by_tokens = (*BUDGET, "--", "padding.cost_model=attention")
    assert result_of(hostile, "plan", hostile / "rows.jsonl", *by_tokens).exit_code == 0


ODD = {
    "a tag": "trainer: !!python/object/apply:os.mkdir [TAKEN]\n",
    "torn": "trainer: {n_gpus_per_node: 8",
    "of other types": "trainer: 5\nactor_rollout_ref: [1]\n",
    "a text": "hello",
    "no engine": "model_engine: ../../etc\n",
}


@pytest.mark.parametrize("odd", ODD)
def test_a_run_whose_config_is_none_is_refused_in_a_line(odd, hostile):
    (hostile / CONFIG).write_text(ODD[odd].replace("TAKEN", str(hostile.parent / TAKEN)))
    result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(str(hostile / CONFIG))


def test_links_without_an_end_are_refused(hostile):
    for name in ("model/config.json", str(CONFIG), "rows.jsonl"):
        (hostile / name).rename(hostile / "kept")
        (hostile / name).symlink_to("/dev/zero")
        result = result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET)
        (hostile / "kept").replace(hostile / name)
        assert result.exit_code == 1
        assert name.rpartition("/")[2] in result.stderr


TYPED = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
)
IN_A_RUN = [
    ("plan", "steps/3.jsonl", *BUDGET),
    ("plan", "steps/3.jsonl", *BUDGET, "--", "+padding=prompt", *TYPED),
    ("doctor",),
]


@pytest.mark.parametrize("arguments", IN_A_RUN, ids=["rows", "rows of a job", "doctor"])
def test_modules_beside_the_user_are_not_those_of_a_run(arguments, hostile):
    command = [Path(sys.executable).with_name("verl-padding"), *arguments]
    ended = subprocess.run(
        [*map(str, command)], cwd=hostile, capture_output=True, text=True, check=False
    )
    assert not taken(hostile)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_a_tokenizers_code_is_not_run(hostile):
    dump = [{"uid": "a_0_0", "input": "ab", "output": "c", "score": 1.0}]
    write_lines(hostile / "d.jsonl", dump)
    arguments = (hostile / "d.jsonl", *BUDGET, "--tokenizer", hostile / "model")
    result = result_of(hostile, "plan", *arguments)
    assert "TokenizersBackend" in result.stderr or result.exit_code == 0
    (hostile / "empty").mkdir()
    result = result_of(hostile, "plan", *arguments[:-1], hostile / "empty")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def beside_a_job(hostile, monkeypatch):
    monkeypatch.chdir(hostile)
    for name in ("hydra_plugins", "flash_attn", "apex", "vllm"):  # which a job's start would find
        shutil.rmtree(hostile / name)


@pytest.mark.parametrize("command", ["doctor", "dry-run"])
def test_a_jobs_config_file_brings_no_module(command, hostile, monkeypatch):
    (hostile / "hostile_lib.py").write_text(f"open({str(hostile.parent / TAKEN)!r}, 'w')")
    beside_a_job(hostile, monkeypatch)
    config = OmegaConf.load(hostile / CONFIG)
    config.actor_rollout_ref.model.trust_remote_code = False
    config.actor_rollout_ref.model.external_lib = "hostile_lib"
    OmegaConf.save(config, hostile / CONFIG)
    of_config = ("--config-path", (hostile / CONFIG).parent, "--config-name", "config")
    result = result_of(hostile, command, *of_config)
    assert result.exit_code == 1
    assert "external_lib=hostile_lib" in "".join(result.output.split())


@pytest.mark.parametrize("command", ["doctor", "dry-run"])
def test_a_jobs_config_file_puts_no_package_on_hydras_search_path(command, hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    (hostile / "beside.py").write_text(f"open({str(hostile.parent / TAKEN)!r}, 'w').close()")
    mine = {"defaults": ["ppo_trainer"], "hydra": {"searchpath": ["pkg://beside"]}}
    OmegaConf.save(OmegaConf.create(mine), hostile / "mine.yaml")
    result = result_of(hostile, command, "--config-dir", hostile, "--config-name", "mine")
    assert result.exit_code == 1
    assert "pkg://beside" in "".join(result.output.split())


@pytest.mark.parametrize("command", ["doctor", "dry-run"])
def test_a_jobs_config_file_does_not_make_its_model_trusted(command, hostile, monkeypatch):
    # The job itself runs its data, agents and rewards, and is not started here.
    def not_started(*_):
        raise AssertionError("nothing was refused")

    monkeypatch.setattr("verl_padding.on_cpu.dry_run._run_job", not_started)
    monkeypatch.chdir(hostile.parent)
    of_config = ("--config-path", (hostile / CONFIG).parent, "--config-name", "config")
    (hostile / "model" / "config.json").write_text(
        json.dumps({"model_type": "hostile", "auto_map": AUTO_MAP, "architectures": ["Trainer"]})
    )
    result = result_of(hostile, command, *of_config)
    assert result.exit_code == 1
    assert "trust_remote_code=True" in result.stderr
    config = OmegaConf.load(hostile / CONFIG)
    config.actor_rollout_ref.actor.optim = target(hostile)
    OmegaConf.save(config, hostile / CONFIG)
    result = result_of(hostile, command, *of_config)
    assert result.exit_code == 1
    assert "logging.FileHandler" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "command", [("report", "RUN"), ("tiny-model", "RUN"), ("demo", "--steps", 1, "--out", "RUN")]
)
def test_the_other_commands_run_nothing_of_a_folder(command, hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result_of(hostile, *[hostile if part == "RUN" else part for part in command])
