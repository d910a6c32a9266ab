"""The actor's model as a job loads it: its tokenizer, its config, and its modules without their weights.

verl's and transformers' own code reads them, without a GPU and without a hub. What a model brings as code of its own
(``trust_remote_code``) is not run here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from verl_padding.doctor.finding import Finding, in_one_line, not_looked_at, ok, panics_as_errors, warning, wrong
from verl_padding.doctor.lora import modules_of_lora
from verl_padding.doctor.models import brings_code, folder_of_model, is_whole
from verl_padding.doctor.named_objects import is_module
from verl_padding.doctor.token_budgets import MODEL_LENGTH, longest_row
from verl_padding.doctor.weights import refuse_broken_weights, refuse_other_shapes
from verl_padding.job.roles_of_job import has_critic, has_separate_reference

MODEL = "actor_rollout_ref.model"
PATH = f"{MODEL}.path"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
WRAP_POLICY = "actor_rollout_ref.actor.fsdp_config.wrap_policy"
LAYERS = f"{WRAP_POLICY}.transformer_layer_cls_to_wrap"
NO_LAYERS = "Could not find any of the transformer layer classes"
"""How verl's error begins where a model has none of the layers that it is to be cut into."""
PATHS = ("path", "tokenizer_path", "hf_config_path")
SETTINGS_OF_PATHS = tuple(f"{MODEL}.{name}" for name in PATHS)
FSDP = ("fsdp", "fsdp2")
"""Engines that make the model by transformers' own class."""
ON_CPU = "transformers"
"""The rollout of +local=cpu."""
SERVES_BY_HEADS = ("vllm", "sglang")
"""Rollouts that share the attention heads out over the ranks of a replica."""
FLASH = "flash_attention"
"""How transformers' names of attentions begin that have kernels for GPUs alone."""
READ_BY_VLLM = ("deepseek_v4",)
"""Kinds of models whose config verl takes from vLLM, where transformers does not know them."""
PACKAGES_OF_QUANTIZED = {
    "aqlm": ("aqlm",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
}
"""Methods of quantizing weights -> modules without which transformers loads none of them, on any device."""


@dataclass(frozen=True)
class LoadedModel:
    """What verl's trainer and workers have after they have read a model's folder."""

    typed: Any
    """verl's ``HFModelConfig``."""

    @property
    def tokenizer(self) -> Any:
        return self.typed.tokenizer

    @property
    def processor(self) -> Any:
        """None for a model that reads text alone."""
        return self.typed.processor

    @property
    def hf_config(self) -> Any:
        return self.typed.hf_config

    @property
    def text_config(self) -> Any:
        """The part that says what the language model is like."""
        return self.hf_config.get_text_config()


def loaded_model(config: DictConfig, loaded: list[LoadedModel]) -> Iterator[Finding]:
    """Reads the model, as the first thing that verl's trainer does.

    Args:
        loaded: gets the model, if it can be read.
    """
    from verl.utils.config import omega_conf_to_dataclass

    section: Any = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True))
    if section.get("external_lib"):
        reason = "a module of your own may change how models are read, and is not run here"
        yield not_looked_at(f"{MODEL}.external_lib", f"{section.external_lib}: {reason}")
        return
    read = {name for name in PATHS if section.get(name)}
    of_hub = False
    with open_dict(section):
        section.update(use_shm=False, trust_remote_code=False)
        for name in PATHS:
            if name not in read:
                continue
            path = str(section[name])
            try:
                folder, reason = folder_to_read(path, name, own_tokenizer="tokenizer_path" in read)
            except OSError as error:
                folder, reason = None, f"cannot be read here ({error})"
            if folder is None:
                yield not_looked_at(f"{MODEL}.{name}", f"{path}: {reason}")
                return
            of_hub |= not os.path.isdir(os.path.expanduser(path))
            section[name] = str(folder)
    path = config.actor_rollout_ref.model.path
    try:
        with no_hub(), panics_as_errors():
            typed = omega_conf_to_dataclass(section)
    except Exception as error:  # of transformers, Hydra or verl, or of Rust's tokenizers
        if of_hub:
            yield not_looked_at(PATH, f"{path}: the hub's cache may have a part of it alone ({in_one_line(error)})")
        else:
            yield wrong(PATH, f"{path}: cannot be read as a model ({in_one_line(error)}).")
        return
    loaded.append(LoadedModel(typed))
    yield ok("tokenizer", type(typed.tokenizer).__name__)


def folder_to_read(path: str, name: str, *, own_tokenizer: bool) -> tuple[Path | None, str]:
    """Returns: the folder that one of the model's paths means; or None, and why it is not read.

    Args:
        name: of the setting in the model's section.
        own_tokenizer: the tokenizer has a path of its own.

    Raises:
        OSError: it cannot be read.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    folder = folder_of_model(path)
    is_folder = os.path.isdir(os.path.expanduser(path))
    has_tokenizer = name == "tokenizer_path" or (name == "path" and not own_tokenizer)
    if folder is None or not (is_folder or is_whole(folder, weights=name == "path", tokenizer=has_tokenizer)):
        return None, "it is fetched when the job starts"
    if brings_code(folder):
        return None, "it brings code of its own, which is not run here"
    described = folder / "config.json"
    text = described.read_text(errors="replace") if described.is_file() else ""
    if any(f'"{kind}"' in text and kind not in CONFIG_MAPPING_NAMES for kind in READ_BY_VLLM):
        return None, "vLLM reads its config"
    return folder, ""


@contextmanager
def no_hub() -> Iterator[None]:
    """Nothing is fetched meanwhile: transformers and the kernels of some models ask the hub for what is missing."""
    from huggingface_hub import constants

    kept = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = kept


def model_of_job(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """Whether the model can be made, its weights fit it, and its heads and positions fit the job."""
    if model.tokenizer.pad_token_id is None:
        yield wrong(
            PATH,
            f"{config.actor_rollout_ref.model.path}: its tokenizer has neither a pad nor an eos token, and verl needs "
            "one of them. Set eos_token in its tokenizer_config.json.",
        )
    yield from _quantization(config, model)
    yield from _heads(config, model)
    yield from _positions(config, model)
    yield from _layers_to_batch(config, model)
    if config.actor_rollout_ref.actor.strategy in FSDP:
        yield from _modules(config, model)


def _quantization(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """Whether there is what transformers needs of packages; what it asks of GPUs is for the machine with the GPUs."""
    quantized = getattr(model.hf_config, "quantization_config", None)
    if quantized is None or config.actor_rollout_ref.actor.strategy not in FSDP:
        return
    described = quantized if isinstance(quantized, dict) else vars(quantized)
    method = str(getattr(described.get("quant_method"), "value", described.get("quant_method")))
    path = config.actor_rollout_ref.model.path
    for package in PACKAGES_OF_QUANTIZED.get(method, ()):
        if not is_module(package):
            yield wrong(
                PATH,
                f"{path}: its weights are quantized, and a package for that is missing (ImportError: {package}, for "
                f"{method}). Install it, or take weights that are not quantized.",
            )
            return
    yield not_looked_at(PATH, f"{path}: its weights are quantized ({method}), which is not tried here")


def _heads(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """What verl and VeOmni assert of ranks that share a row, and what a rollout asks of tensor parallel ranks."""
    heads = getattr(model.text_config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    sizes = {}
    for setting in _sizes_of_rows(config):
        sizes[setting] = "a row"
    if config.actor_rollout_ref.rollout.name in SERVES_BY_HEADS:
        sizes["actor_rollout_ref.rollout.tensor_model_parallel_size"] = "the model"
    for setting, shared in sizes.items():
        ranks = OmegaConf.select(config, setting)
        if isinstance(ranks, int) and ranks > 1 and heads % ranks:
            yield wrong(
                setting,
                f"{ranks}: so many ranks share the attention heads of {shared}, and the model has {heads}. Set it to a "
                "divisor.",
            )


def _sizes_of_rows(config: DictConfig) -> Iterator[str]:
    """Settings of Ulysses for the engines that compute the actor's model; one that follows the actor's is told once."""
    roles = ["actor_rollout_ref.actor"]
    if has_separate_reference(config):
        roles.append("actor_rollout_ref.ref")
    if has_critic(config) and config.critic.model.path == config.actor_rollout_ref.model.path:
        roles.append("critic")
    told = set()
    for role in roles:
        strategy = OmegaConf.select(config, f"{role}.strategy")
        if strategy in FSDP:
            setting = _ulysses_of_fsdp(config, role)
        elif strategy == "veomni":
            setting = f"{role}.veomni.ulysses_parallel_size"
        else:
            continue
        ranks = OmegaConf.select(config, setting)
        if ranks not in told:
            told.add(ranks)
            yield setting


def _ulysses_of_fsdp(config: DictConfig, role: str) -> str:
    """verl hands a critic's own setting to no engine, and that of actor and reference where it is more than 1."""
    own = f"{role}.ulysses_sequence_parallel_size"
    if role != "critic" and (OmegaConf.select(config, own) or 1) > 1:
        return own
    return f"{role}.{'fsdp' if role == 'critic' else 'fsdp_config'}.ulysses_sequence_parallel_size"


def _positions(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    most = getattr(model.text_config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return
    allowed = OmegaConf.select(config, MODEL_LENGTH)
    if config.actor_rollout_ref.rollout.name == "vllm" and isinstance(allowed, int) and allowed > most:
        yield wrong(
            MODEL_LENGTH, f"{allowed}: the model's max_position_embeddings is {most}. Lower it, or leave it out."
        )
    longest, told = longest_row(config)
    if longest > most:
        yield warning(
            "data.max_response_length",
            f"{config.data.max_response_length}: rows may be as long as {told}, but the model was made for {most} "
            "(max_position_embeddings). Lower one of them.",
        )


def _layers_to_batch(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """Whether the rollout of +local=cpu can put the rows of this model into one batch."""
    from transformers import DynamicCache, DynamicLayer

    if config.actor_rollout_ref.rollout.name != ON_CPU:
        return
    others = {type(layer).__name__ for layer in DynamicCache(config=model.hf_config).layers} - {DynamicLayer.__name__}
    if others:
        yield wrong(
            PATH,
            f"{config.actor_rollout_ref.model.path}: the rollout {ON_CPU!r} takes models with full attention in every "
            f"layer, and this one has others ({', '.join(sorted(others))}). Choose another model, or vLLM.",
        )


def _modules(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """Makes the model on no device, as the FSDP engine makes it, and does to it what that engine does first."""
    from copy import deepcopy

    import torch
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy
    from verl.utils.model import get_hf_auto_model_class

    path = config.actor_rollout_ref.model.path
    described = deepcopy(model.hf_config)
    attention = str(described._attn_implementation)
    flash = attention.rpartition("|")[2].startswith(FLASH)
    if flash and config.trainer.device == "cpu":
        yield wrong(ATTENTION, f"{attention}: verl's own choice, and it has no kernels for a CPU. Set it to sdpa.")
        return
    if flash or "/" in attention:
        # Neither a package for GPUs nor kernels of a hub are loaded here; the package is told with the packages.
        described._attn_implementation = "eager"
    try:
        with no_hub(), torch.device("meta"):
            made: Any = get_hf_auto_model_class(described).from_config(described, trust_remote_code=False)
        if config.actor_rollout_ref.model.get("enable_gradient_checkpointing"):
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        get_fsdp_wrap_policy(made, OmegaConf.select(config, WRAP_POLICY))
    except (RuntimeError, OSError, AssertionError) as error:  # of torch, without numbers or a GPU, or of a hub
        yield not_looked_at(PATH, f"{path}: the model cannot be made here without its weights ({in_one_line(error)})")
        return
    except Exception as error:  # of transformers, of the model's own checks, or of verl
        if NO_LAYERS in str(error):
            named = OmegaConf.select(config, LAYERS)
            layers = list(named) if isinstance(named, ListConfig) else named
            yield wrong(LAYERS, f"{layers}: no layers of {path}. Leave it out, for those that the model names itself.")
            return
        yield wrong(PATH, f"{path}: the model cannot be made ({in_one_line(error)}).")
        return
    if flash and not getattr(made, "_supports_flash_attn", True):
        yield wrong(ATTENTION, f"{attention}: {type(made).__name__} has no such attention. Set it to sdpa or eager.")
        return
    yield from modules_of_lora(config, made)
    if getattr(described, "quantization_config", None) is None:
        yield from _shapes(path, {name: tuple(each.shape) for name, each in made.state_dict().items()})
    yield ok("model", type(made).__name__)


def _shapes(path: str, wanted: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    folder = Path(os.path.expanduser(path))
    try:
        refuse_other_shapes(refuse_broken_weights(folder) if folder.is_dir() else {}, wanted)
    except LookupError as problem:
        yield wrong(PATH, f"{path}: {problem}. Fetch config.json and weights of the same model.")


def size_of_embedding(model: LoadedModel) -> int | None:
    """Token ids that the model knows, of which the largest is one less; None where its config does not say."""
    size = getattr(model.text_config, "vocab_size", None)
    return size if isinstance(size, int) else None
