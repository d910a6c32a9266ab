"""Which attention computes packed rows where flash-attn, verl's default, is not installed."""

import logging
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf, open_dict

logger = logging.getLogger(__name__)

PACKED = "torch_flash_attention"
"""Value of ``attn_implementation`` for torch's own (``worker/packed_attention.py``).

transformers' models look for "flash" in it before they pass on where images begin and end.
"""
FSDP = ("fsdp", "fsdp2")
FLASH_ATTN = "flash_attention_2"
"""verl's default, for models of FSDP engines."""
MODELS = {"actor_rollout_ref.model": "actor_rollout_ref.actor", "critic.model": "critic"}
"""Section of a model -> section of the engine that trains it."""


def use_torch_attention(config: DictConfig) -> list[str]:
    """Has the models of FSDP engines on CUDA attend by torch where they would by flash-attn, which is not there.

    Returns: the settings that were changed.
    """
    # With the package kernels, transformers fetches flash-attn from its hub.
    if config.trainer.device != "cuda" or find_spec("flash_attn") or find_spec("kernels"):
        return []
    changed = []
    for section, engine in MODELS.items():
        setting = f"{section}.override_config.attn_implementation"
        is_fsdp = OmegaConf.select(config, f"{engine}.strategy") in FSDP
        if is_fsdp and (OmegaConf.select(config, setting) or FLASH_ATTN) == FLASH_ATTN:
            with open_dict(config):
                OmegaConf.update(config, setting, PACKED, force_add=True)
            changed.append(setting)
    if changed:
        logger.warning(
            "verl_padding: flash-attn is not installed, so torch's own kernel attends to packed rows (%s=%s)",
            " and ".join(changed),
            PACKED,
        )
    return changed
