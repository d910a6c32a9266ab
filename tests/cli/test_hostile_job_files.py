"""Config files of somebody else's job: no command runs code of theirs, unless the command line says
so."""

import json
import shutil

import pytest
import verl.utils.config
from omegaconf import OmegaConf

from tests.support.hostile_run import (
    AUTO_MAP,
    TAKEN,
    beside_a_job,
    fetched_by_a_shell,
    result_of,
    target,
    write_config,
)
from verl_padding.errors import PaddingConfigError
from verl_padding.on_cpu.reduced_job import reduced, write_shrunk_model
from verl_padding.record.run_files import CONFIG


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


@pytest.mark.parametrize("place", ["path", "hf_config_path", "tokenizer_path"])
def test_the_doctor_opens_no_model_of_a_critic_that_is_no_folder(place, hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    checked, check = [], verl.utils.config.validate_config

    def noted(*args):
        checked.append(args)
        check(*args)

    monkeypatch.setattr("verl.utils.config.validate_config", noted)
    config = OmegaConf.load(hostile / CONFIG)
    config.algorithm.adv_estimator = "gae"
    config.critic.model[place] = fetched_by_a_shell(hostile)
    OmegaConf.save(config, hostile / CONFIG)
    of_config = ("--config-path", (hostile / CONFIG).parent, "--config-name", "config")
    result_of(hostile, "doctor", *of_config)
    assert checked


def test_a_dry_run_opens_no_model_but_its_own(hostile, job, tmp_path):
    config = OmegaConf.load(write_config(hostile, job))
    for section in (config.actor_rollout_ref.model, config.critic.model):
        for place in ("path", "hf_config_path", "tokenizer_path", "lora_adapter_path"):
            section[place] = fetched_by_a_shell(hostile)
    small, _ = reduced(config, model=tmp_path, folder=tmp_path, attention="sdpa")
    assert "hdfs://" not in OmegaConf.to_yaml(small, resolve=True)
    config.data.val_files = [fetched_by_a_shell(hostile)]
    with pytest.raises(PaddingConfigError, match=r"^data\.val_files="):
        reduced(config, model=tmp_path, folder=tmp_path, attention="sdpa")


def test_what_a_file_means_once_it_is_checked_is_what_was_checked(hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    config = OmegaConf.load(hostile / CONFIG)
    config.actor_rollout_ref.model.trust_remote_code = False
    config.algorithm.adv_estimator = "gae"
    del config.padding
    # Without the critic's model, which the doctor leaves out of verl's check, it is another.
    config.critic.model.empty = ""
    tools = config.actor_rollout_ref.actor.profiler.tool_config
    named = target(hostile)["_target_"]
    tools.hostile = target(hostile) | {"_target_": "${oc.select:critic.model.empty," + named + "}"}
    OmegaConf.save(config, hostile / CONFIG)
    of_config = ("--config-path", (hostile / CONFIG).parent, "--config-name", "config")
    result_of(hostile, "doctor", *of_config)


def test_a_small_model_has_none_of_the_code_of_one_that_is_not_trusted(tiny_model, tmp_path):
    model, tokenizer = (shutil.copytree(tiny_model, tmp_path / name) for name in ("model", "own"))
    for folder in (model, tokenizer):
        (folder / "conf.py").write_text("raise AssertionError")
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": AUTO_MAP}))
    section = {"path": str(model), "tokenizer_path": str(tokenizer)}
    for trusted in (False, True):
        section["trust_remote_code"] = trusted
        write_shrunk_model(OmegaConf.create(section), small := tmp_path / str(trusted))
        assert (small / "conf.py").exists() == trusted
        kept = json.loads((small / "tokenizer_config.json").read_text())
        assert ("auto_map" in kept) == trusted
