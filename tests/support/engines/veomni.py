"""verl's VeOmni engines for device "cpu". Nothing is changed in a process before it builds one."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import torch

from verl_padding.on_cpu.verl_patches import register_on_cpu
from verl_padding.worker.varlen_attention import flash_attn_func, flash_attn_varlen_func


def register_engines(transformer_impl):
    register_on_cpu(transformer_impl, "VeOmniEngine", "veomni", _OnCpu)


class _OnCpu:
    """Mixin before one of verl's VeOmni engines."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._autocast_dtype = torch.float32  # verl's word for no autocast

    def _build_model_optimizer(self):
        _replace_flash_attn()
        # verl takes VeOmni's own dtype for what is computed, bfloat16, which a CPU emulates:
        # slowly, and hiding small errors. It has no setting for it.
        from verl.workers.engine.veomni import transformer_impl

        in_float32 = partial(transformer_impl.MixedPrecisionConfig, param_dtype="float32")
        with mock.patch.object(transformer_impl, "MixedPrecisionConfig", in_float32):
            super()._build_model_optimizer()


@cache
def _replace_flash_attn():
    """Lets VeOmni's flash attention, which exchanges tokens for heads between Ulysses ranks, run
    without flash-attn, by the function that padded FSDP jobs use."""
    from transformers import modeling_flash_attention_utils as attention
    from veomni.ops.kernels.attention import flash

    functions = flash_attn_func, flash_attn_varlen_func
    find = attention._lazy_imports

    def find_ours(implementation, *args, **kwargs):
        if implementation != "flash_attention_2":
            return find(implementation, *args, **kwargs)
        return *functions, None, attention._pad_input, attention._unpad_input

    attention._lazy_imports = find_ours
    names = "flash_attn_func", "flash_attn_varlen_func"
    ours = SimpleNamespace(**dict(zip(names, functions, strict=True)))
    flash._load_veomni_local_flash_kernel = lambda implementation: ours
