"""The attention of measured updates: transformers' own, as stock verl has it, with a mask over a micro-batch.

``+local=cpu`` attends to packed rows one by one (:mod:`verl_padding.local.row_attention`), which is faster by itself.
"""

from typing import Any


def use_transformers_attention(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``, once the worker's model is made."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from verl.protocol import DataProto

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    return DataProto()
