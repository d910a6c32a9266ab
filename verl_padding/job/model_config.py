"""The model of a role: its Hugging Face config, and what that says of it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError

OF_HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
"""A model of the hub, such as Qwen/Qwen3-4B."""
ROPE_BY_LENGTH = ("dynamic", "longrope", "su")
"""Rotary embeddings whose angles depend on the longest position of an input; ``su`` is an old name
of ``longrope``."""
TOWERS = ("vision", "visual", "audio")
"""What the names of those parts of a model's config have in them that see one image or sound, and
no text."""


def folder_here(path: Any) -> Path | None:
    """The folder of a model or tokenizer that a config names, if it is one of this machine.

    All that only look at a job open nothing else: verl fetches ``hdfs://`` by a shell command.
    """
    folder = Path(str(path)).expanduser().absolute()
    return folder if folder.is_dir() else None


def disable_remote_code_prompt() -> None:
    """Has transformers refuse code that comes with a model where it would ask on standard input,
    which may be a file of rows."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def config_path(model: DictConfig) -> Any:
    """Where a section's model has its config."""
    return model.get("hf_config_path") or model.path


def read_model_config(config: DictConfig, section: str, *, fetched: bool = False) -> dict[str, Any]:
    """The config of a section's model (``actor_rollout_ref.model`` or ``critic.model``), with its
    overrides; refused where it cannot be read.

    Args:
        fetched: whether verl has fetched the model. If it has not, only a folder or a model in the
            hub's cache is read.
    """
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local
    from verl.utils.model import update_model_config

    model = OmegaConf.select(config, section)
    setting = "hf_config_path" if model.get("hf_config_path") else "path"
    path, remote = model[setting], bool(model.get("trust_remote_code", False))
    try:
        folder = folder_here(path)
        if not folder and not fetched and not OF_HUB.fullmatch(path):
            raise FileNotFoundError("no folder here")
        place = folder or (copy_to_local(path) if fetched else path)
        hf_config = AutoConfig.from_pretrained(
            str(place), trust_remote_code=remote, local_files_only=not fetched
        )
    except ImportError:
        raise
    except Exception as error:  # of any kind, by what is in the file
        why = shorten(f"{type(error).__name__}: {error}", 500)
        what = f"{section}.{setting}={path}: its config cannot be read ({why})"
        raise PaddingConfigError(f"{what}. Correct the path, or fetch the model.") from error
    own = model.get("override_config") or OmegaConf.create({})
    override = OmegaConf.to_container(own, resolve=True)
    assert isinstance(override, dict)
    update_model_config(hf_config, override.get("model_config", override))
    return dict(hf_config.to_dict())


def rope_by_length(config: Mapping[str, Any]) -> str | None:
    """The setting by which a model's rotary embedding depends on the length of the input; None if
    it does not."""
    # The parameters of an embedding are a part, too, as are those of each kind of layer.
    for part in _parts(config):
        if (kind := part.get("rope_type") or part.get("type")) in ROPE_BY_LENGTH:
            return f"rope_type={kind!r}"
    return None


def has_linear_attention(config: Mapping[str, Any]) -> bool:
    """Whether a model has layers of linear attention, by its config."""
    return any("linear_attention" in (part.get("layer_types") or ()) for part in _parts(config))


def has_tower(config: Mapping[str, Any]) -> bool:
    """Whether a model sees images or hears sounds, by a tower anywhere in its config."""
    return any(
        isinstance(value, Mapping)
        and (any(tower in str(name) for tower in TOWERS) or has_tower(value))
        for name, value in config.items()
    )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A model's config, and those in it, whatever they are named; but for towers."""
    yield config
    for name, value in config.items():
        if isinstance(value, Mapping) and not any(tower in str(name) for tower in TOWERS):
            yield from _parts(value)
