"""A job, reduced to what a CPU can run: its config (the rest stays the user's), and a small model
of its kind."""

import json
import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_padding import configs
from verl_padding.errors import PaddingConfigError, refuse
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.model_config import folder_here
from verl_padding.job.role_engine import ACTOR_MODEL, ACTOR_SECTION, REF_SECTION
from verl_padding.record.run_files import ROLLOUTS

# merged in this order
ON_A_CPU = ("shared/host_is_cpu.yaml", "local/cpu.yaml", "shared/dry_run.yaml")
ROLLOUT, MODEL = "actor_rollout_ref.rollout", ACTOR_MODEL
# Tokens of a response that is let be, with calls of tools: scripted replies have some 24 each. The
# logits of a micro-batch are large also for a shrunk model, which keeps its vocabulary.
SHORT_RESPONSE = 2048
LEFT_OUT = (
    "reward.reward_model.enable",
    "distillation.enabled",
    "algorithm.filter_groups.enable",
    f"{ROLLOUT}.enable_rollout_routing_replay",
)
"""What the dry run turns off, and reports where the job asks for it."""

HEADS, HEAD = 2, 32
WIDTH = HEADS * HEAD
SIZES = {
    "mamba_n_heads": 128,
    "moe_k": 2,
    "hidden_size": WIDTH,  # also out_hidden_size: a vision tower's outputs are as wide as the text
    "embed_dim": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "_heads": HEADS,
    "qk_head_dim": 2 * HEAD,  # turned by positions, and not
    "head_dim": HEAD,
    "lora_rank": HEAD,
    "experts": 4,
    "experts_per_tok": 2,
    "predict_layers": 0,
    "_layers": 2,
    "depth": 2,
    "dense_replace": 1,
    "_group": 1,
    "num_position_embeddings": 64,
}
"""End of a key of a model's config -> its largest size; the first one holds."""
LAYERS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
"""Which layers of a vision tower are special."""
OF_ENGINE = {"strategy", "_target_", "optim", "checkpoint"}
"""What a section of an engine has under the same name as another engine's, and for itself."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def reduced(config: DictConfig, *, folder: Path, attention: str) -> tuple[DictConfig, list[str]]:
    """The reduced config, and in words what of the job is left out.

    Args:
        config: of the job; it is not changed.
        folder: where all that the job writes goes; its shrunk model is in ``model`` there.
        attention: implementation that the model has on a CPU.
    """
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        refuse(f"{ROLLOUT}.name=None", "verl needs the rollout's name", "Set it, such as to vllm.")
    config = config.copy()
    left_out = [setting for setting in LEFT_OUT if OmegaConf.select(config, setting)]
    critic = OmegaConf.select(config, "critic.model.path")
    if critic not in (None, config.actor_rollout_ref.model.path):
        left_out.append(f"critic.model.path ({critic}): the critic has the actor's model")
    _check_data_is_here(config)
    tokenizer = config.actor_rollout_ref.model.get("tokenizer_path")
    if tokenizer and not folder_here(tokenizer):
        left_out.append(f"{MODEL}.tokenizer_path ({tokenizer}): the model's own takes its place")
    left_out.append(f"{ROLLOUT}.name={config.actor_rollout_ref.rollout.name}: replies are scripted")
    changes = _changes(config)
    with read_write(config), open_dict(config):
        if (strategy := config.actor_rollout_ref.actor.strategy) not in ("fsdp", "fsdp2"):
            _put_fsdp2(config)
            left_out.append(f"the engine {strategy}: FSDP2 takes its place")
        # What the job sets is overwritten; what these files leave out stays the job's.
        for name in ON_A_CPU:
            config.merge_with(OmegaConf.load(Path(configs.__file__).parent / name))
        config.pop("defaults", None)
        for section in (config.actor_rollout_ref.model, config.critic.model):
            section.path = str(folder / "model")
            section.override_config.attn_implementation = attention
        config.trainer.rollout_data_dir = str(folder / ROLLOUTS)
        for setting, value in changes.items():
            OmegaConf.update(config, setting, value)
    return config, left_out


def _check_data_is_here(config: DictConfig) -> None:
    """Refuses files of data that verl would fetch, those of ``hdfs://`` by a shell command."""
    for name in ("train_files", "val_files"):
        files = config.data.get(name)
        for file in [files] if isinstance(files, str) else files or ():
            if "://" in file:
                refuse(f"data.{name}={file}", "a dry run fetches no data", "Name a file here.")


def _changes(config: DictConfig) -> dict[str, Any]:
    """Setting -> its value in the dry run, where that depends on the job."""
    validates = config.trainer.get("val_before_train", True) or config.trainer.test_freq > 0
    changes = {"trainer.test_freq": 1 if validates else -1}
    limits = {
        "max_token_len_per_gpu": config.data.max_prompt_length + SHORT_RESPONSE,
        "micro_batch_size_per_gpu": 1,
    }
    for section in (ACTOR_SECTION, REF_SECTION, ROLLOUT, "critic"):
        for name, value in OmegaConf.select(config, section).items():
            for end, limit in limits.items():
                if value is not None and name.endswith(end):
                    changes[f"{section}.{name}"] = min(value, limit)
    return changes


def _put_fsdp2(config: DictConfig) -> None:
    """Gives a job the engine of a CPU; what sections of both engines have stays the job's."""
    # Sections of Megatron and FSDP2 have most settings in common: losses, epochs, batch sizes.
    # Those stay the job's, and what is FSDP2's alone is verl's default.
    base = compose_job(JobArguments())
    with read_write(base):
        for section in (ACTOR_SECTION, REF_SECTION, "critic"):
            mine, fsdp2 = OmegaConf.select(config, section), OmegaConf.select(base, section)
            for name in (mine.keys() & fsdp2.keys()) - OF_ENGINE:
                fsdp2[name] = mine[name]
            OmegaConf.update(config, section, fsdp2, merge=False)
    for section in (MODEL, "critic.model"):
        if rank := OmegaConf.select(config, f"{section}.lora.rank"):  # Megatron's name of it
            OmegaConf.update(config, f"{section}.lora_rank", rank)


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A config of Hugging Face with small sizes in the place of large ones; no key is new."""
    # For example, of Qwen3-4B: 36 layers to 2, hidden size 2560 to 64, 32 heads on 8 to 2 on 1.
    small = {
        key: value
        for key, value in config.items()
        if key != "quantization_config" and not key.endswith("_implementation")
    }
    for key, value in small.items():
        size = next((size for end, size in SIZES.items() if key.endswith(end)), None)
        if size is not None and type(value) is int:
            small[key] = min(value, size)
    # Grouped heads stay grouped: 8 of 32 become 1 of 2, and 32 of 32 become 2 of 2.
    if heads := config.get("num_key_value_heads"):
        small["num_key_value_heads"] = HEADS if heads == config.get("num_attention_heads") else 1
    if kinds := small.get("layer_types"):  # one of each kind, if there are two
        small["layer_types"] = [*dict.fromkeys(kinds), *kinds][:2]
    for key in ("rope_scaling", "rope_parameters"):
        rope = small.get(key) or {}
        if "mrope_section" in rope:  # a head's frequencies for time, height and width
            small[key] = rope | {"mrope_section": [HEAD // 4, HEAD // 8, HEAD // 8]}
        if "long_factor" in rope:  # LongRoPE has a factor for each frequency of a large head
            small[key] = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4)}
    small |= {key: layers for key, layers in LAYERS.items() if key in small}
    parts = ("text_config", "vision_config")
    return small | {part: shrunk(small[part]) for part in parts if small.get(part)}


def write_shrunk_model(section: DictConfig, place: Path) -> tuple[str, str]:
    """Writes config, random weights, and whatever of the model's folder is not weights.

    Args:
        section: ``actor_rollout_ref.model``, which names a folder or a model in the hub's cache.
            Another config that it names takes the place of the model's own.

    Returns: what it is, in words, and the attention that it has on a CPU.

    Raises:
        PaddingConfigError: the model is not here, or its config does not name its class.
    """
    import torch
    import transformers
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    trust = section.trust_remote_code
    place.mkdir(parents=True)
    folder = Path(section.path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(section.path, local_files_only=True))
        except LocalEntryNotFoundError as error:
            fix = f"Fetch it (hf download {section.path} --exclude '*.safetensors')."
            why = "neither a local folder nor in the hub's cache"
            raise PaddingConfigError(f"{MODEL}.path={section.path}: {why}. {fix}") from error
    config = json.loads(Path(section.get("hf_config_path") or folder, "config.json").read_text())
    tokenizer = folder_here(section.get("tokenizer_path") or folder)
    for source in (folder, tokenizer) if tokenizer else (folder,):
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copy(file, place / file.name)
    (place / "config.json").write_text(json.dumps(shrunk(config), indent=1))
    hf = transformers.AutoConfig.from_pretrained(place, trust_remote_code=trust)
    if not hf.architectures:
        why = "its config.json has no architectures, from which verl finds the model's class"
        refuse(f"{MODEL}.path={section.path}", why, "Add it.")
    name = hf.architectures[0]
    model_class = getattr(transformers, name, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Other names of transformers, which somebody's folder may have, are not called.
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            model = model_class(hf)
        else:  # code that comes with the model
            model = transformers.AutoModelForCausalLM.from_config(hf, trust_remote_code=trust)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(place)
    parameters = sum(weight.numel() for weight in model.parameters())
    described = f"{name}, shrunk to {parameters:,} parameters with random weights"
    return described, "sdpa" if model._supports_sdpa else "eager"
