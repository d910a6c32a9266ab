"""``verl-padding tiny-model``: one command, one folder."""

from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from verl_padding.cli.app import app


def tiny_model(*arguments):
    return CliRunner().invoke(app, ["tiny-model", *map(str, arguments)])


def test_a_model_is_made_in_an_empty_folder_and_its_setting_is_printed(tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    result = tiny_model(tmp_path / "models" / "mine", "--family", "qwen3")
    assert result.exit_code == 0, result.output
    assert f"actor_rollout_ref.model.path={tmp_path}/models/mine" in result.stdout
    assert AutoConfig.from_pretrained(tmp_path / "models" / "mine").model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "models" / "mine").decode([0, 1, 2])
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]
