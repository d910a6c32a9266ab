"""``verl-padding doctor`` on models: their folders, their weights, and what is made of them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.support.jobs_for_doctor import (
    FLAG,
    LFS_POINTER,
    MODEL,
    Kind,
    Machine,
    Reasons,
    assert_told,
    assert_tried_and_well,
    contents_of,
    findings_of,
    matters,
)
from verl_padding.doctor import loaded_model as looks_at_model
from verl_padding.doctor.folders import folders_of_job
from verl_padding.doctor.models import brings_code, is_whole, models_of_job
from verl_padding.doctor.weights import LENGTH, LONGEST_HEAD, refuse_broken_weights

pytestmark = pytest.mark.usefixtures("no_ray_cluster")


def _changed(folder: Path, name: str, **changes: object) -> list[str]:
    """Overrides for a model with other values in one of its files; None takes a key out."""
    told = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    return [f"{MODEL}={folder}"]


def no_model(machine: Machine) -> list[str]:
    return [f"actor_rollout_ref.model.path={machine.folder}/nowhere"]


def a_model_with_a_slash_at_its_end(machine: Machine) -> list[str]:
    return [f"{MODEL}={machine.tiny_model}/"]


def a_tokenizer_with_a_slash_at_its_end(machine: Machine) -> list[str]:
    return [f"actor_rollout_ref.model.tokenizer_path={machine.tiny_model}/"]


def a_model_in_the_home_folder(machine: Machine) -> list[str]:
    machine.patch.setenv("HOME", str(machine.model().parent))
    return [f"{MODEL}='~/model'"]


def verls_own_model_that_is_nowhere(machine: Machine) -> list[str]:
    return [f"{MODEL}='~/models/deepseek-llm-7b-chat'"]


def a_model_without_weights(machine: Machine) -> list[str]:
    machine.file("config.json", "{}")
    return [f"actor_rollout_ref.model.path={machine.folder}"]


def a_model_of_a_hub_that_is_out_of_reach(machine: Machine) -> list[str]:
    from huggingface_hub import constants

    machine.patch.setattr(constants, "HF_HUB_OFFLINE", False)
    machine.patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    machine.patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    return ["actor_rollout_ref.model.path=some/model", "padding.cost_model=model"]


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


def lora_on_modules_of_another_model(machine: Machine) -> list[str]:
    model = "actor_rollout_ref.model"
    return [f"{model}.lora_rank=8", f"{model}.target_modules=[query_key_value]"]


def lora_on_a_pattern_that_no_module_has(machine: Machine) -> list[str]:
    model = "actor_rollout_ref.model"
    return [f"{model}.lora_rank=8", f"{model}.target_modules=q_proj"]  # PEFT takes it for a whole name


def weights_that_are_a_pointer(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "model.safetensors").write_text(LFS_POINTER)
    return [f"{MODEL}={folder}"]


def old_weights_that_are_a_pointer(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_text(LFS_POINTER)
    return [f"{MODEL}={folder}"]


def weights_that_are_cut_off(machine: Machine) -> list[str]:
    folder = machine.model()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    return [f"{MODEL}={folder}"]


def old_weights_that_are_cut_off(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(100))
    return [f"{MODEL}={folder}"]


def weights_of_which_a_part_is_missing(machine: Machine) -> list[str]:
    folder = machine.model()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [f"{MODEL}={folder}"]


def weights_of_another_model(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", intermediate_size=256)


def a_tokenizer_that_is_a_pointer(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "tokenizer.json").write_text(LFS_POINTER)
    return [f"{MODEL}={folder}"]


def a_config_that_is_no_json(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "config.json").write_text('{"model_type": "qwen2",')
    return [f"{MODEL}={folder}"]


def a_kind_of_model_that_nobody_knows(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", model_type="qwen99")


def two_architectures(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", architectures=["Qwen2ForCausalLM", "Qwen2Model"])


def quantized_weights_without_their_package(machine: Machine) -> list[str]:
    return _changed(machine.model(), "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def an_attention_that_is_misspelt(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.override_config.attn_implementation=spda"]


def a_layer_to_wrap_that_the_model_lacks(machine: Machine) -> list[str]:
    setting = "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    return [f"+{setting}=[LlamaDecoderLayer]"]


def a_tokenizer_without_any_end(machine: Machine) -> list[str]:
    kind = "PreTrainedTokenizerFast"  # Qwen's own would have one in any case
    folder = machine.model()
    _changed(folder, "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    return _changed(folder, "tokenizer_config.json", eos_token=None, pad_token=None, tokenizer_class=kind)


def an_adapter_that_is_none(machine: Machine) -> list[str]:
    return [f"actor_rollout_ref.model.lora_adapter_path={machine.folder}"]


def _adapter(machine: Machine, hidden: int) -> list[str]:
    """Overrides of a job with an adapter, as PEFT saves it, of a model with this width."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.from_pretrained(machine.tiny_model, hidden_size=hidden)
    model = get_peft_model(AutoModelForCausalLM.from_config(described), LoraConfig(target_modules="all-linear"))
    model.save_pretrained(machine.folder / "adapter")
    return [f"actor_rollout_ref.model.lora_adapter_path={machine.folder / 'adapter'}"]


def an_adapter_of_another_model(machine: Machine) -> list[str]:
    return _adapter(machine, 128)


def an_adapter_that_is_cut_off(machine: Machine) -> list[str]:
    overrides = _adapter(machine, 64)
    with (machine.folder / "adapter" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    return overrides


def _critic(machine: Machine, kind: str) -> list[str]:
    """Overrides of a job with a critic of this kind of model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    described = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, vocab_size=512)
    AutoModelForCausalLM.from_config(described).save_pretrained(machine.folder / kind)
    return ["algorithm.adv_estimator=gae", f"critic.model.path={machine.folder / kind}"]


def a_critic_without_a_head_for_values(machine: Machine) -> list[str]:
    return _critic(machine, "granite")


def a_critic_whose_config_is_no_json(machine: Machine) -> list[str]:
    overrides = _critic(machine, "llama")
    machine.file("llama/config.json", "{")
    return overrides


def layers_that_the_rollout_cannot_batch(machine: Machine) -> list[str]:
    folder = machine.model()
    described = json.loads((folder / "config.json").read_text())
    layers = ["full_attention", *["sliding_attention"] * (described["num_hidden_layers"] - 1)]
    described |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": layers}
    (folder / "config.json").write_text(json.dumps(described))
    return [f"{MODEL}={folder}"]


CANNOT_START: Reasons = {
    layers_that_the_rollout_cannot_batch: (
        MODEL,
        "the rollout 'transformers' takes models with full attention in every layer, and this one has others (",
    ),
    no_model: (MODEL, "/nowhere: there is no such folder"),
    a_model_with_a_slash_at_its_end: (MODEL, "/: ends with a /, and verl takes no such path. Write /"),
    a_tokenizer_with_a_slash_at_its_end: ("actor_rollout_ref.model.tokenizer_path", "/: ends with a /, and verl takes"),
    a_model_in_the_home_folder: (MODEL, "~/model: verl does not know what ~ is. Write the whole path: /"),
    verls_own_model_that_is_nowhere: (
        MODEL,
        "~/models/deepseek-llm-7b-chat: is the value of verl's own config, and not here. Name yours;",
    ),
    a_model_without_weights: (MODEL, "the folder has no weights"),
    a_model_of_a_hub_that_is_out_of_reach: (MODEL, "http://127.0.0.1:9 cannot be reached"),
    no_such_teacher: ("distillation.teacher_models.teacher_model.model_path", "/nowhere/teacher: there is no such"),
    lora_on_modules_of_another_model: (
        "actor_rollout_ref.model.target_modules",
        "['query_key_value']: the model has no module of this name. Its linear layers are down_proj, gate_proj, ",
    ),
    lora_on_a_pattern_that_no_module_has: (
        "actor_rollout_ref.model.target_modules",
        "q_proj: the model has no module of this name. Its linear layers are down_proj, gate_proj, ",
    ),
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
    a_layer_to_wrap_that_the_model_lacks: (
        "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",
        "Leave it out, for those that the model names itself.",
    ),
    a_tokenizer_without_any_end: (MODEL, "has neither a pad nor an eos token"),
    an_adapter_of_another_model: (
        "actor_rollout_ref.model.lora_adapter_path",
        "adapter: made for another model: its model.layers.0.mlp.down_proj gives 128 numbers, that of this model 64.",
    ),
    an_adapter_that_is_cut_off: ("actor_rollout_ref.model.lora_adapter_path", "adapter_model.safetensors is cut off"),
    a_critic_without_a_head_for_values: (
        "critic.model.path",
        "transformers has no model of the kind granite with one number a token (AutoModelForTokenClassification)",
    ),
    a_critic_whose_config_is_no_json: ("critic.model.path", "cannot be read as a model ("),
    an_adapter_that_is_none: ("actor_rollout_ref.model.lora_adapter_path", "the folder has no adapter_config.json"),
}
"""Why a job cannot start, or cannot end its first step -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(reason, composed, machine):
    assert_told(contents_of(composed, reason(machine)), *CANNOT_START[reason])


def weights_in_parts(machine: Machine) -> list[str]:
    import transformers

    folder = machine.model()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return [f"{MODEL}={folder}"]


def weights_of_an_old_torch(machine: Machine) -> list[str]:
    import torch
    from safetensors.torch import load_file

    folder = machine.model()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return [f"{MODEL}={folder}"]


def an_adapter_of_this_model(machine: Machine) -> list[str]:
    return [*_adapter(machine, 64), "actor_rollout_ref.model.lora.merge=true"]


def a_critic_of_another_kind(machine: Machine) -> list[str]:
    return _critic(machine, "llama")


LEGAL: list[Kind] = [
    an_adapter_of_this_model,
    a_critic_of_another_kind,
    weights_in_parts,
    weights_of_an_old_torch,
]


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_job_of_a_rare_kind_is_not_called_wrong(kind, composed, machine):
    assert_tried_and_well(contents_of(composed, kind(machine)))


def test_a_hub_that_is_busy_is_not_taken_for_one_without_the_model(monkeypatch):
    from verl_padding.doctor.models import Hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for code, told in ((404, "the hub has none for you"), (503, "cannot be reached (HTTP 503)")):
        monkeypatch.setattr(Hub, "_ask", lambda self, name, code=code: code)
        finding = Hub().finding(MODEL, "some/model")
        assert finding.verdict == "wrong"
        assert told in finding.told
    monkeypatch.setattr(Hub, "_ask", lambda self, name: 200)
    assert Hub().finding(MODEL, "some/model").verdict == "ok"


@pytest.mark.usefixtures("composed_once")
def test_a_model_that_is_not_here_is_told_once_though_verls_check_of_a_critic_loads_it_too(job):
    found = findings_of(*job, FLAG, "algorithm.adv_estimator=gae", "critic.model.path=/nowhere")
    assert [finding.subject for finding in found if finding.verdict == "wrong"] == ["critic.model.path"]
    assert [finding.subject for finding in found if finding.verdict == "not looked at"] == ["verl's own check"]


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


def test_weights_that_are_a_link_to_nothing_are_told(composed, machine):
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(machine.folder / "gone")
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"model": {"path": str(folder)}}})
    (told,) = [each for each in models_of_job(config) if each.subject == MODEL]
    assert (told.verdict, "has no weights" in told.told) == ("wrong", True)
    assert not [each for each in folders_of_job(config) if each.verdict == "wrong"]


def test_a_pointer_that_nobody_reads_is_let_pass(composed, machine):
    folder = machine.model()
    (folder / "training_args.json").write_text(LFS_POINTER)
    config = OmegaConf.merge(composed, {"actor_rollout_ref": {"model": {"path": str(folder)}}})
    assert not matters(models_of_job(config))


def test_an_attention_of_gpus_is_not_loaded_and_the_model_is_made_all_the_same(composed, monkeypatch):
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
def test_what_needs_weights_or_a_gpu_is_told_from_what_cannot_be_made(error, verdict, composed, monkeypatch):
    def fails(*arguments, **settings):
        raise error

    loaded: list[looks_at_model.LoadedModel] = []
    assert not matters(looks_at_model.loaded_model(composed, loaded))
    monkeypatch.setattr("verl.utils.fsdp_utils.get_fsdp_wrap_policy", fails)
    (matter,) = matters(looks_at_model.model_of_job(composed, *loaded))
    assert matter.verdict == verdict


@pytest.mark.parametrize(("quantized", "verdict"), [("gptq", "wrong"), ("fbgemm_fp8", "not looked at")])
def test_quantized_weights_are_wrong_only_where_a_package_is_missing(quantized, verdict, composed, monkeypatch):
    loaded: list[looks_at_model.LoadedModel] = []
    assert not matters(looks_at_model.loaded_model(composed, loaded))
    loaded[0].hf_config.quantization_config = {"quant_method": quantized}
    (matter,) = looks_at_model._quantization(composed, *loaded)
    assert matter.verdict == verdict


def test_what_rust_panics_at_is_told(composed, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 has it."""

    def panics(section):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("verl.utils.config.omega_conf_to_dataclass", panics)
    (matter,) = looks_at_model.loaded_model(composed, [])
    assert (matter.verdict, "index out of bounds" in matter.told) == ("wrong", True)


def test_a_tokenizer_of_the_hub_needs_no_weights_and_a_part_of_a_model_is_not_looked_at(
    composed,
    machine,
    monkeypatch,
):
    folder = machine.model()
    (folder / "model.safetensors").unlink()
    assert is_whole(folder, weights=False, tokenizer=True)
    assert not is_whole(folder, weights=True, tokenizer=False)
    monkeypatch.setattr(looks_at_model, "folder_of_model", lambda path: folder if path == "own/tokenizer" else None)
    assert looks_at_model.folder_to_read("own/tokenizer", "tokenizer_path", own_tokenizer=True)[0] == folder
    assert looks_at_model.folder_to_read("own/tokenizer", "path", own_tokenizer=False)[0] is None
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
