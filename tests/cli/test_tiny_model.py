"""``verl-padding tiny-model``: one command, one folder, and nobody's files are touched."""

import json
import os
from errno import EACCES
from pathlib import Path
from typing import get_args

import pytest
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from verl_padding.cli.app import Family, app
from verl_padding.local import tiny_models


def tiny_model(*arguments: object):
    return CliRunner().invoke(app, ["tiny-model", *map(str, arguments)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_folder_is_the_models_path_and_the_job_is_told_it(tmp_path):
    result = tiny_model(tmp_path / "models" / "mine", "--family", "qwen3")
    assert result.exit_code == 0, result.output
    assert f"actor_rollout_ref.model.path={tmp_path}/models/mine" in result.stdout
    assert AutoConfig.from_pretrained(tmp_path / "models" / "mine").model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "models" / "mine").decode([0, 1, 2])
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]


def test_an_empty_folder_is_filled_and_the_seed_decides_the_weights(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        assert tiny_model(tmp_path / name, "--seed", int(name == "c")).exit_code == 0
    a, b, c = (contents(tmp_path / name)["model.safetensors"] for name in ("a", "b", "c"))
    assert a == b != c


def test_the_same_model_again_is_left_as_it_is_and_another_one_is_refused(tmp_path):
    place = tmp_path / "model"
    assert tiny_model(place).exit_code == 0
    before = contents(place)
    again = tiny_model(place)
    assert again.exit_code == 0
    assert "was already in" in again.stdout
    for other in (["--seed", "1"], ["--family", "qwen3"]):
        refused = tiny_model(place, *other)
        assert refused.exit_code == 1
        assert f"{place}: holds the tiny qwen2 model of seed 0" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert contents(place) == before


@pytest.mark.parametrize("look", ["is_dir", "iterdir"])
def test_a_folder_that_nobody_may_look_into_is_refused_in_a_line(look, tmp_path, monkeypatch):
    def may_not(folder):
        raise PermissionError(EACCES, os.strerror(EACCES))

    monkeypatch.setattr(Path, look, may_not)
    refused = tiny_model(tmp_path)
    assert refused.exit_code == 1
    assert refused.stderr == f"{tmp_path}: cannot be written (Permission denied). Name another folder.\n"


@pytest.mark.parametrize("name", ["thesis.tex", tiny_models.MADE_OF])
def test_a_folder_with_other_files_is_refused_and_they_stay(name, tmp_path):
    (tmp_path / name).write_text("years of work")
    refused = tiny_model(tmp_path)
    assert refused.exit_code == 1
    assert f"{tmp_path}: holds other files" in refused.stderr
    assert contents(tmp_path) == {name: b"years of work"}


def test_a_file_and_the_folder_that_one_is_in_are_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "afile").write_text("years of work")
    refused = tiny_model(tmp_path / "afile")
    assert refused.exit_code == 1
    assert "afile: is a file" in refused.stderr
    below = tiny_model(tmp_path / "afile" / "model")
    assert below.exit_code == 1
    assert "afile/model: cannot be written (File exists)" in below.stderr
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    here = tiny_model(".")
    assert here.exit_code == 1
    assert "is the folder that you are in" in here.stderr
    assert (tmp_path / "afile").read_text() == "years of work"


def test_a_family_whose_packages_are_missing_names_the_extra(tmp_path, monkeypatch):
    def missing(tokenizer):
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr(tiny_models, "_image_processor", missing)
    refused = tiny_model(tmp_path / "model", "--family", "qwen3_vl")
    assert refused.exit_code == 1
    assert "--family=qwen3_vl: takes packages that are not installed" in refused.stderr
    assert ".[vision]" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_family_that_is_not_there_is_told_with_the_choices(tmp_path):
    refused = tiny_model(tmp_path / "model", "--family", "gpt5")
    assert refused.exit_code == 2
    assert "qwen3_moe" in refused.output


def test_what_it_was_made_of_is_in_the_folder(tmp_path):
    tiny_model(tmp_path / "model", "--seed", "3")
    assert json.loads((tmp_path / "model" / tiny_models.MADE_OF).read_text()) == {"kind": "qwen2", "seed": 3}


def test_the_command_line_names_the_families_that_there_are():
    assert get_args(Family) == get_args(tiny_models.TinyModelKind)
