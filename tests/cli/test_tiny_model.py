"""``verl-padding tiny-model``: one command, one folder, and nobody's files are touched."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from verl_padding.cli.app import app


def tiny_model(*arguments: object):
    return CliRunner().invoke(app, ["tiny-model", *map(str, arguments)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_is_made_in_an_empty_folder_and_its_setting_is_printed(tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    result = tiny_model(tmp_path / "models" / "mine", "--family", "qwen3")
    assert result.exit_code == 0, result.output
    assert f"actor_rollout_ref.model.path={tmp_path}/models/mine" in result.stdout
    assert AutoConfig.from_pretrained(tmp_path / "models" / "mine").model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "models" / "mine").decode([0, 1, 2])
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]


def test_a_folder_with_other_files_is_refused_in_one_line_and_they_stay(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    refused = tiny_model(place)
    assert refused.exit_code == 1
    assert str(place) in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert contents(place) == {"thesis.tex": b"years of work"}
    assert list(tmp_path.iterdir()) == [place]
