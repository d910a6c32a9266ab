"""Which attention computes packed rows where flash-attn, verl's default, is not installed."""

import logging
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.job.role_engine import ACTOR_MODEL, ACTOR_SECTION, CRITIC_MODEL

logger = logging.getLogger(__name__)

PACKED = "torch_flash_attention"
"""Name of torch's own attention (``worker/packed_attention.py``), which takes the place of sdpa.

Models of transformers look for "flash" in it before they pass on where rows begin and end.
"""
FSDP = ("fsdp", "fsdp2")
FLASH_ATTN = "flash_attention_2"
"""verl's default, for models of FSDP engines."""


def use_torch_attention(config: DictConfig) -> None:
    """Has the models of FSDP engines on CUDA attend by torch where they would by flash-attn, which
    is not there."""
    # With the package kernels, transformers fetches flash-attn from its hub.
    if config.trainer.device != "cuda" or find_spec("flash_attn") or find_spec("kernels"):
        return
    for model, section in {ACTOR_MODEL: ACTOR_SECTION, CRITIC_MODEL: "critic"}.items():
        setting = f"{model}.override_config.attn_implementation"
        is_fsdp = OmegaConf.select(config, f"{section}.strategy") in FSDP
        if is_fsdp and OmegaConf.select(config, setting, default=FLASH_ATTN) == FLASH_ATTN:
            with open_dict(config):
                OmegaConf.update(config, setting, "sdpa", force_add=True)
            why = "flash-attn is not installed, so torch's own kernel attends to packed rows"
            logger.warning("verl_padding: %s (%s=sdpa)", why, setting)
