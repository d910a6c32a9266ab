"""``verl-padding doctor`` on models, folders and code that are rare, broken or half there."""

import ast
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cli.test_doctor import (  # noqa: F401  (fixtures)
    LFS_POINTER,
    LOOP,
    MODEL,
    SCORED,
    Machine,
    composed,
    contents_of,
    job,
    no_ray_cluster,
    prompts,
    tiny_model,
)
from verl_padding.doctor import loaded_model as looks_at_model
from verl_padding.doctor.finding import Finding
from verl_padding.doctor.folders import folders_of_job
from verl_padding.doctor.models import brings_code, is_whole, models_of_job
from verl_padding.doctor.named_objects import refuse_missing_imports
from verl_padding.doctor.rewards import rewards_of_job, scores_source
from verl_padding.doctor.signatures import class_of_target, defined_in, lacks_attribute, method
from verl_padding.doctor.tools import tools_of_job
from verl_padding.doctor.weights import LENGTH, LONGEST_HEAD, refuse_broken_weights

FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch, tiny_model) -> Machine:  # noqa: F811
    return Machine(tmp_path, monkeypatch, tiny_model)


def matters(findings) -> list[Finding]:
    return [each for each in findings if each.verdict != "ok"]


@pytest.mark.parametrize("named", [["a"], {"b": 1}, 3, None], ids=str)
def test_an_index_that_names_no_files_is_told(named, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": named}}))
    with pytest.raises(LookupError, match="is no index of weights"):
        refuse_broken_weights(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [3, {"data_offsets": [0, "x"], "shape": []}, {"data_offsets": [0, 1e999], "shape": []}, {"data_offsets": [0, 4]}],
    ids=str,
)
def test_a_head_of_another_form_is_told(entry, tmp_path):
    head = json.dumps({"weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(LENGTH, "little") + head + bytes(8))
    with pytest.raises(LookupError, match="has no head of safetensors"):
        refuse_broken_weights(tmp_path)


def test_a_head_longer_than_any_is_not_read(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((LONGEST_HEAD + 1).to_bytes(LENGTH, "little"))
        file.truncate(2 * LONGEST_HEAD)  # which takes no room on the disk
    with pytest.raises(LookupError, match="has no head of safetensors"):
        refuse_broken_weights(tmp_path)


def test_weights_that_are_a_link_to_nothing_are_told(composed, machine):  # noqa: F811
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(machine.folder / "gone")
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"model": {"path": str(folder)}}})
    (told,) = [each for each in models_of_job(config) if each.subject == MODEL]
    assert (told.verdict, "has no weights" in told.told) == ("wrong", True)
    assert not [each for each in folders_of_job(config) if each.verdict == "wrong"]


def test_a_pointer_that_nobody_reads_is_let_pass(composed, machine):  # noqa: F811
    folder = machine.model()
    (folder / "training_args.json").write_text(LFS_POINTER)
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"model": {"path": str(folder)}}})
    assert not matters(models_of_job(config))


def test_a_folder_that_cannot_be_read_stops_no_look(composed, monkeypatch):  # noqa: F811
    def refuses(config) -> list[Finding]:
        raise PermissionError("Permission denied")

    monkeypatch.setattr("verl_padding.doctor.folders._disk", refuses)
    (matter,) = matters(folders_of_job(composed))
    assert (matter.verdict, "Permission denied" in matter.told) == ("not looked at", True)


def test_an_attention_of_gpus_is_not_loaded_and_the_model_is_made_all_the_same(composed, monkeypatch):  # noqa: F811
    import torch

    def is_asked() -> bool:
        raise AssertionError("a GPU was asked for")

    for name in ("is_available", "get_device_capability", "current_device"):
        monkeypatch.setattr(torch.cuda, name, is_asked)
    overrides = [
        "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
        "trainer.device=cuda",
    ]
    config = OmegaConf.merge(composed, OmegaConf.from_dotlist(overrides))
    loaded: list[looks_at_model.LoadedModel] = []
    assert not matters(looks_at_model.loaded_model(config, loaded))
    assert not matters(looks_at_model.model_of_job(config, *loaded))
    monkeypatch.setattr("transformers.Qwen2ForCausalLM._supports_flash_attn", False)
    (matter,) = matters(looks_at_model.model_of_job(config, *loaded))
    assert (matter.subject, matter.verdict) == (looks_at_model.ATTENTION, "wrong")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("no NVIDIA driver"), "not looked at"),
        (NotImplementedError("Cannot copy out of meta tensor"), "not looked at"),
        (ValueError("the model's metadata is wrong"), "wrong"),
    ],
    ids=str,
)
def test_what_needs_weights_or_a_gpu_is_told_from_what_cannot_be_made(error, verdict, composed, monkeypatch):  # noqa: F811
    def fails(*arguments, **settings):
        raise error

    loaded: list[looks_at_model.LoadedModel] = []
    assert not matters(looks_at_model.loaded_model(composed, loaded))
    monkeypatch.setattr("verl.utils.fsdp_utils.get_fsdp_wrap_policy", fails)
    (matter,) = matters(looks_at_model.model_of_job(composed, *loaded))
    assert matter.verdict == verdict


@pytest.mark.parametrize(("quantized", "verdict"), [("gptq", "wrong"), ("fbgemm_fp8", "not looked at")])
def test_quantized_weights_are_wrong_only_where_a_package_is_missing(quantized, verdict, composed, monkeypatch):  # noqa: F811
    loaded: list[looks_at_model.LoadedModel] = []
    assert not matters(looks_at_model.loaded_model(composed, loaded))
    loaded[0].hf_config.quantization_config = {"quant_method": quantized}
    (matter,) = looks_at_model._quantization(composed, *loaded)
    assert matter.verdict == verdict


def test_what_rust_panics_at_is_told(composed, monkeypatch):  # noqa: F811
    class PanicException(BaseException):
        """As pyo3 has it."""

    def panics(section):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("verl.utils.config.omega_conf_to_dataclass", panics)
    (matter,) = looks_at_model.loaded_model(composed, [])
    assert (matter.verdict, "index out of bounds" in matter.told) == ("wrong", True)


def test_a_tokenizer_of_the_hub_needs_no_weights_and_a_part_of_a_model_is_not_looked_at(
    composed,  # noqa: F811
    machine,
    monkeypatch,
):
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    assert is_whole(folder, weights=False, tokenizer=True)
    assert not is_whole(folder, weights=True, tokenizer=False)
    monkeypatch.setattr(looks_at_model, "folder_of_model", lambda path: folder if path == "own/tokenizer" else None)
    assert looks_at_model._folder_to_read("own/tokenizer", "tokenizer_path", own_tokenizer=True)[0] == folder
    assert looks_at_model._folder_to_read("own/tokenizer", "path", own_tokenizer=False)[0] is None
    (machine.folder / "cached").mkdir()
    half = Path(machine.folder / "cached")
    for file in machine.tiny_model.iterdir():
        (half / file.name).write_bytes(b"{}" if file.name == "tokenizer.json" else file.read_bytes())
    monkeypatch.setattr(looks_at_model, "folder_of_model", lambda path: half)
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"model": {"path": "some/model"}}})
    (matter,) = looks_at_model.loaded_model(config, [])
    assert matter.verdict == "not looked at", matter


def test_code_of_a_processor_is_code_of_the_models_own(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "mine.Processor"}}')
    assert brings_code(tmp_path)


@pytest.mark.parametrize(
    "after",
    [
        "compute_score = adapt(compute_score)\n",
        "from rewards import compute_score\n",
        "if True:\n    def compute_score(*args): ...\n",
        "globals()['compute_score'] = len\n",
    ],
)
def test_a_function_that_is_bound_anew_is_not_taken_for_the_first_one(after, tmp_path):
    source = tmp_path / "reward.py"
    source.write_text(FUNCTION)
    assert isinstance(defined_in(source, "compute_score"), ast.FunctionDef)
    source.write_text(FUNCTION + after)
    assert defined_in(source, "compute_score") is None


def test_what_a_class_extends_is_read_in_verls_files_and_no_module_is_imported(tmp_path, monkeypatch):
    def imports(name: str, *more: str) -> None:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr("importlib.import_module", imports)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"loops_of_{tmp_path.name}"
    source = tmp_path / f"{name}.py"

    def lacks(text: str) -> bool:
        source.write_text(text)
        found = class_of_target(f"{name}.Mine")
        assert found is not None
        return lacks_attribute(*found, "run")

    package = "from verl.experimental.agent_loop import {0}\nclass Mine({0}):\n    x = 1\n"
    assert lacks(package.format("AgentLoopBase")), "its run is abstract"
    assert not lacks(package.format("SingleTurnAgentLoop"))
    assert lacks("class Mine: ...\n")
    assert not lacks("class Mine: ...\nMine.run = print\n")
    again = "class AgentLoopBase(AgentLoopBase):\n    async def run(self): ...\n"
    assert not lacks(package.format("AgentLoopBase").replace("class Mine", f"{again}class Mine"))


def test_a_class_that_cannot_be_known_without_a_run_is_not_looked_into(tmp_path):
    (tmp_path / "loops.py").write_text("from x import Mine\nclass Mine(Mine): ...\n")
    assert defined_in(tmp_path / "loops.py", "Mine") is None


def test_a_method_that_is_wrapped_is_not_read(tmp_path):
    (owner,) = ast.parse("class Mine:\n    def run(self): ...\n    run = traced(run)\n").body
    assert isinstance(owner, ast.ClassDef)
    assert method(owner, "run") is None


def test_imports_after_a_change_of_pythons_path_are_let_pass(tmp_path):
    source = tmp_path / "reward.py"
    source.write_text("import sys\nimport no_such_module_at_all\n")
    with pytest.raises(LookupError, match="no_such_module_at_all"):
        refuse_missing_imports(source)
    source.write_text("import sys\nsys.path.append('/elsewhere')\nimport no_such_module_at_all\n")
    refuse_missing_imports(source)


def test_a_function_that_a_manager_of_ones_own_calls_may_take_what_it_likes(composed, machine):  # noqa: F811
    path = machine.file("reward.py", "def compute_score(text):\n    return 1.0\n")
    reward = {"custom_reward_function": {"path": path, "name": "compute_score"}}
    config = OmegaConf.merge(composed, {"reward": reward})
    assert [each.verdict for each in matters(rewards_of_job(config, asked=False))] == ["wrong"]
    config = OmegaConf.merge(config, {"reward": {"reward_manager": {"name": "mine"}}})
    assert [each.verdict for each in matters(rewards_of_job(config, asked=False))] == ["not looked at"]


@pytest.mark.parametrize("source", [None, 3, ["openai/gsm8k"]], ids=str)
def test_a_data_source_that_is_no_text_has_no_score(source):
    assert scores_source("openai/gsm8k")
    assert not scores_source(source)


TOOL = """\
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: one.
        {second}
    '''
    return a + b
"""


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        (TOOL.format(second="b: another."), False),
        (TOOL.format(second="b (int): another."), True),
        (TOOL.replace("@function_tool\n", "@function_tool\n@checked\n"), False),
    ],
)
def test_a_tools_docstring_is_read_as_transformers_reads_it(text, is_told, composed, machine):  # noqa: F811
    multi_turn = {"function_tool_path": machine.file("tools.py", text)}
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}}})
    (found,) = tools_of_job(config)
    assert (found.verdict == "wrong") == is_told, found


def test_tools_that_are_no_list_are_told(composed, machine):  # noqa: F811
    path = machine.file("tools.yaml", "tools: nothing\n")
    multi_turn = {"tool_config_path": path}
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}}})
    (found,) = tools_of_job(config)
    assert "its key tools holds no list" in found.told


def test_prompts_are_tried_where_the_model_can_be_read(composed, machine):  # noqa: F811
    prompts(16).to_parquet(machine.folder / "data.parquet")
    found = contents_of(composed, [*machine.loop(LOOP + SCORED), f"data.train_files={machine.folder}/data.parquet"])
    assert [each.told for each in found if each.subject == "data.train_files" and "tried" in each.told]
