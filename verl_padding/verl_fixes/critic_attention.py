"""The attention of a critic: verl 0.9 asks for flash-attn whatever the critic's config has."""

from functools import wraps
from typing import Any

from transformers import AutoModelForTokenClassification
from transformers.utils import (
    is_flash_attn_2_available,
    is_kernels_available,
    is_torch_npu_available,
)


def load_critics_by_config(_: Any) -> None:
    """Loads a critic with the attention of its config, where flash-attn is neither installed nor
    can be fetched."""
    from verl.utils import model

    load_with_flash_attn = model.load_valuehead_model

    @wraps(load_with_flash_attn)
    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        if is_flash_attn_2_available() or is_kernels_available() or is_torch_npu_available():
            return load_with_flash_attn(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    model.load_valuehead_model = load
