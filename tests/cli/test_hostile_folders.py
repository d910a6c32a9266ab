"""Folders of somebody else: no command runs code of theirs, unless the command line says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate
from typer.testing import CliRunner

from tests.cli.test_plan import write_lines
from tests.support.fresh_processes import run_fresh
from tests.support.hostile_run import (
    AUTO_MAP,
    BUDGET,
    ROWS,
    result_of,
    taken,
    target,
)
from verl_padding.cli.app import app
from verl_padding.cli.plan import _load_tokenizer
from verl_padding.errors import PaddingDataError


def test_what_a_command_line_trusts_is_run(hostile, job):
    trusting = [f"actor_rollout_ref.model.path={hostile / 'model'}", "+padding=rows"]
    trusting.append("actor_rollout_ref.model.trust_remote_code=true")
    CliRunner().invoke(app, ["plan", str(hostile / "rows.jsonl"), "--", *job, *trusting])
    assert taken(hostile)
    instantiate(target(hostile))
    assert taken(hostile)


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
    (refusal,) = result.stderr.splitlines()
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
