"""Folders of somebody else: no command runs code of theirs, unless the command line says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.cli.test_plan import write_lines
from tests.support.fresh_processes import run_fresh
from tests.support.hostile_run import (
    AUTO_MAP,
    BUDGET,
    ROWS,
    TAKEN,
    fetched_by_a_shell,
    result_of,
    taken,
    target,
    write_config,
)
from verl_padding.cli.app import app
from verl_padding.cli.plan import _load_tokenizer
from verl_padding.errors import PaddingDataError
from verl_padding.record.run_files import CONFIG


def planned(hostile, *options):
    return result_of(hostile, "plan", hostile / "rows.jsonl", *BUDGET, *options)


@pytest.mark.parametrize("name", ["rows.jsonl", "steps/3.jsonl"])
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
    plain = planned(hostile, "--json")
    for place in ("actor_rollout_ref__actor__optim__betas", "actor_rollout_ref__actor__more"):
        write_config(hostile, job, path, **{place: [target(hostile)]})
        planned(hostile)
    targets = {"actor_rollout_ref__actor___target_": "logging.FileHandler"}
    write_config(hostile, job, path, **targets, hydra__searchpath=["pkg://flash_attn"])
    result = planned(hostile, "--json")
    assert json.loads(result.stdout)["steps"] == json.loads(plain.stdout)["steps"]


MAKES = "${{oc.create:{{_target_: logging.FileHandler, filename: {taken}}}}}"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("actor_rollout_ref__actor__optim", MAKES),
        ("trainer__more", "${{${{trainer.project_name}}:{taken}}}"),
    ],
)
def test_a_runs_config_resolves_to_nothing_that_acts(value, place, hostile, job):
    made = value.format(taken=hostile.parent / TAKEN)
    path = write_config(hostile, job)
    config = OmegaConf.load(path)
    OmegaConf.update(config, place.replace("__", "."), made, force_add=True)
    OmegaConf.save(config, path)
    result = planned(hostile)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert str(path) in line


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
    config = OmegaConf.load(path := write_config(hostile, job, model_engine=evil))
    del config.actor_rollout_ref.actor.optim.override_optimizer_config
    OmegaConf.save(config, path)
    result = planned(hostile)
    assert result.exit_code == 1
    assert "model_engine" in result.stderr


def test_the_models_of_a_run_are_folders_or_are_not_opened(hostile, job):
    of_critic = {"path": str(hostile / "model"), "hf_config_path": fetched_by_a_shell(hostile)}
    write_config(hostile, job, critic__model=of_critic, algorithm__adv_estimator="gae")
    assert planned(hostile).exit_code == 0


def test_a_run_has_verls_classes_in_verls_places_alone(hostile, job):
    path = write_config(hostile, job, "actor_rollout_ref.model.path=" + str(hostile / "model"))
    config = OmegaConf.load(path)
    config.actor_rollout_ref.model.tokenizer_path = fetched_by_a_shell(hostile)
    config.actor_rollout_ref.actor.optim.betas = ["${actor_rollout_ref.model}"]
    OmegaConf.save(config, path)
    result = planned(hostile)
    assert result.exit_code == 1
    assert "betas" in result.stderr


def test_a_config_above_is_of_steps_and_rollouts_alone(hostile):
    (hostile / "mine").mkdir()
    rows = write_lines(hostile / "mine" / "rows.jsonl", ROWS)
    result = result_of(hostile, "plan", "--json", rows, *BUDGET)
    assert str(hostile / CONFIG) not in result.stderr
    assert json.loads(result.stdout)["strategy"] == "prompt"


ODD = {
    "a tag": "trainer: !!python/object/apply:os.mkdir [TAKEN]\n",
    "of other types": "trainer: 5\nactor_rollout_ref: [1]\n",
    "no engine": "model_engine: ../../etc\n",
}


def test_a_run_whose_config_is_none_is_refused_in_a_line(hostile):
    for odd, text in ODD.items():
        (hostile / CONFIG).write_text(text.replace("TAKEN", str(hostile.parent / TAKEN)))
        result = planned(hostile)
        assert result.exit_code == 1, odd
        (line,) = result.stderr.splitlines()
        assert line.startswith(str(hostile / CONFIG)), odd


def test_links_without_an_end_are_refused(hostile):
    for name in ("model/config.json", "rows.jsonl"):
        (hostile / name).rename(hostile / "kept")
        (hostile / name).symlink_to("/dev/zero")
        result = planned(hostile)
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
    ("plan", "steps/3.jsonl", *BUDGET, "--", "+padding=prompt", *TYPED),
    ("doctor",),
]


@pytest.mark.parametrize("arguments", IN_A_RUN, ids=["rows of a job", "doctor"])
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
    _, refusal = result.stderr.splitlines()  # whose job it is stands before it
    assert (result.exit_code, "--tokenizer=" in refusal) == (1, True)


def test_rows_do_not_answer_what_a_tokenizer_asks(hostile, monkeypatch):
    folder = hostile / "model"
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "AutoConfig"}))
    config = {"model_type": "hostile", "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(PaddingDataError, match=r"^--tokenizer="):
        _load_tokenizer(str(folder))
    assert not taken(hostile)


WATCHED = """
import socket, sys

def asked(host, *_, **__):
    print("asked for", host)
    raise OSError(host)

socket.getaddrinfo = asked
from verl_padding.cli.app import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize("offline", [None, pytest.param("0", marks=pytest.mark.slow)])
def test_no_command_asks_the_hub_for_what_a_model_names(offline, monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    config = {"model_type": "dpt", "backbone": "someone/model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("plan", str(write_lines(tmp_path / "rows.jsonl", ROWS)), "--tokenizer")
    said = run_fresh(WATCHED, *arguments, str(tmp_path), platform="cpu").stdout
    assert ("asked for huggingface.co" in said) == (offline == "0")
