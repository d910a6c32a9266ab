"""The actor's model as a job loads it: its tokenizer, its config, and its modules without their weights.

verl's and transformers' own code reads them. What a model brings as code of its own (``trust_remote_code``) is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.doctor.finding import Finding, in_one_line, not_looked_at, ok, warning, wrong
from verl_padding.doctor.lora import modules_of_lora
from verl_padding.doctor.models import brings_code, folder_of_model, is_whole
from verl_padding.doctor.named_objects import is_module
from verl_padding.doctor.weights import refuse_broken_weights, refuse_other_shapes

MODEL = "actor_rollout_ref.model"
PATH = f"{MODEL}.path"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
PATHS = ("path", "tokenizer_path", "hf_config_path")
SETTINGS_OF_PATHS = tuple(f"{MODEL}.{name}" for name in PATHS)
FSDP = ("fsdp", "fsdp2")
"""Engines that make the model by transformers' own class."""
SERVES_BY_HEADS = ("vllm", "sglang")
"""Rollouts that share the attention heads out over the ranks of a replica."""


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
    with open_dict(section):
        section.update(use_shm=False, trust_remote_code=False)
        for name in PATHS:
            if not (path := section.get(name)):
                continue
            folder = folder_of_model(path)
            if folder is None or not (Path(path).expanduser().is_dir() or is_whole(folder)):
                yield not_looked_at(f"{MODEL}.{name}", f"{path}: it is fetched when the job starts")
                return
            if brings_code(folder):
                yield not_looked_at(f"{MODEL}.{name}", f"{path}: it brings code of its own, which is not run here")
                return
            section[name] = str(folder)
    try:
        typed = omega_conf_to_dataclass(section)
    except Exception as error:  # of transformers, tokenizers, Hydra or verl
        yield wrong(PATH, f"{config.actor_rollout_ref.model.path}: cannot be read as a model ({in_one_line(error)}).")
        return
    loaded.append(LoadedModel(typed))
    yield ok("tokenizer", type(typed.tokenizer).__name__)


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
    if config.actor_rollout_ref.actor.strategy in FSDP:
        yield from _modules(config, model)


def _quantization(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """As transformers' ``from_pretrained`` looks at it; what it says about GPUs is for the machine with the GPUs."""
    from transformers.quantizers.auto import AutoHfQuantizer

    quantized = getattr(model.hf_config, "quantization_config", None)
    if quantized is None or config.actor_rollout_ref.actor.strategy not in FSDP:
        return
    path = config.actor_rollout_ref.model.path
    try:
        if AutoHfQuantizer.supports_quant_method(quantized):
            AutoHfQuantizer.from_config(quantized, pre_quantized=True).validate_environment(
                device_map=None, weights_only=True
            )
    except ImportError as error:
        yield wrong(
            PATH, f"{path}: its weights are quantized, and a package for that is missing ({in_one_line(error)})."
        )
    except Exception as error:  # of a quantizer that looks for a GPU
        yield not_looked_at(PATH, f"{path}: its weights are quantized ({in_one_line(error)})")


def _heads(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """What verl asserts when it patches a model for Ulysses, and what a rollout asks of tensor parallel ranks."""
    heads = getattr(model.text_config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    sizes = {}
    if config.actor_rollout_ref.actor.strategy in FSDP:
        sizes["actor_rollout_ref.actor.ulysses_sequence_parallel_size"] = "a row"
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


def _positions(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    most = getattr(model.text_config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return
    setting = "actor_rollout_ref.rollout.max_model_len"
    allowed = OmegaConf.select(config, setting)
    if config.actor_rollout_ref.rollout.name == "vllm" and isinstance(allowed, int) and allowed > most:
        yield wrong(setting, f"{allowed}: the model's max_position_embeddings is {most}. Lower it, or leave it out.")
    data = config.data
    longest = data.max_prompt_length + data.max_response_length
    if longest > most:
        yield warning(
            "data.max_response_length",
            f"{data.max_response_length}: with data.max_prompt_length a row has up to {longest} tokens, but the model "
            f"was made for {most} (max_position_embeddings). Lower one of them.",
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
    if "/" in attention:
        described._attn_implementation = "eager"  # a kernel that transformers fetches from a hub
    elif attention.startswith("flash_attention") and not (is_module("flash_attn") and torch.cuda.is_available()):
        if config.trainer.device == "cpu":
            yield wrong(ATTENTION, f"{attention}: verl's own choice, and it has no kernels for a CPU. Set it to sdpa.")
            return
        described._attn_implementation = "eager"  # whether its package is here is told with the packages
    try:
        with torch.device("meta"):
            made: Any = get_hf_auto_model_class(described).from_config(described, trust_remote_code=False)
        if config.actor_rollout_ref.model.get("enable_gradient_checkpointing"):
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        get_fsdp_wrap_policy(made, OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.wrap_policy"))
    except Exception as error:  # of transformers, of the model's own checks, or of verl
        if "meta" in str(error):
            yield not_looked_at(PATH, f"{path}: the model cannot be made without its weights")
            return
        yield wrong(PATH, f"{path}: the model cannot be made ({in_one_line(error)}).")
        return
    yield from modules_of_lora(config, [name for name, _ in made.named_modules() if name])
    if getattr(described, "quantization_config", None) is None:
        yield from _shapes(path, {name: tuple(each.shape) for name, each in made.state_dict().items()})
    yield ok("model", type(made).__name__)


def _shapes(path: str, wanted: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    folder = Path(path).expanduser()
    try:
        refuse_other_shapes(refuse_broken_weights(folder) if folder.is_dir() else {}, wanted)
    except LookupError as problem:
        yield wrong(PATH, f"{path}: {problem}. Fetch config.json and weights of the same model.")


def size_of_embedding(model: LoadedModel) -> int | None:
    """Token ids that the model knows, of which the largest is one less; None where its config does not say."""
    size = getattr(model.text_config, "vocab_size", None)
    return size if isinstance(size, int) else None
