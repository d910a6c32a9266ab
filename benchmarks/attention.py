"""The attention of measured updates on a CPU: transformers' own, as stock verl has it, or row by row.

The former has a mask over a micro-batch and computes all pairs of its tokens; ``+local=cpu`` attends to packed rows one
by one (:mod:`verl_padding.local.row_attention`), which is faster by itself.
"""

from typing import Any


def use_transformers_attention(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``, once the worker's model is made."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from verl.protocol import DataProto

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    return DataProto()


def use_row_attention(worker: Any) -> Any:
    """As :func:`use_transformers_attention`, of ``+local=cpu``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from verl.protocol import DataProto

    from verl_padding.local.row_attention import attend_row_by_row

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend_row_by_row
    return DataProto()
