"""verl's VeOmni engines on a CPU, in float32. Nothing is changed in a process before it builds one.

Registered when verl imports its VeOmni engine, which it does wherever veomni is installed. What it shows is the logic
of the engine: how VeOmni builds, shards, loads and saves a model, its ranks, packed rows, gradients and weights. What
it does not show is VeOmni's kernels, nccl and low precision.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from verl_padding.job.engine_refusals import refuse_attention_past_ulysses
from verl_padding.local.engine_versions import refuse_other_versions
from verl_padding.local.ulysses import STRATEGY_OF_GROUP


def register_engines(transformer_impl: ModuleType) -> None:
    """Registers verl's VeOmni engine classes for device "cpu" (verl registers them for cuda and npu)."""
    for model_type, engine in {
        "language_model": transformer_impl.VeOmniEngineWithLMHead,
        "value_model": transformer_impl.VeOmniEngineWithValueHead,
    }.items():
        on_cpu = type(f"{engine.__name__}OnCpu", (_OnCpu, engine), {"verls_module": transformer_impl})
        transformer_impl.EngineRegistry.register(model_type=model_type, backend="veomni", device="cpu")(on_cpu)


class _OnCpu:
    """Mixin before one of verl's VeOmni engines."""

    verls_module: Any
    engine_config: Any
    ulysses_parallel_group: Any

    def __init__(self, *args: Any, **kwargs: Any):
        refuse_other_versions("veomni")
        super().__init__(*args, **kwargs)
        config = self.engine_config
        refuse_attention_past_ulysses(  # a job without padding is checked nowhere else
            "veomni",
            "cpu",
            config.attn_implementation,
            config.ulysses_parallel_size,
            setting="veomni.attn_implementation",
        )
        self._autocast_dtype = torch.float32  # verl's word for no autocast
        if self.ulysses_parallel_group is not None:
            STRATEGY_OF_GROUP[self.ulysses_parallel_group] = "veomni"

    def _build_model_optimizer(self) -> None:
        # verl takes VeOmni's own dtype for what is computed, bfloat16, which a CPU emulates: slowly, and hiding small
        # errors. It has no setting for it.
        precision = self.verls_module.MixedPrecisionConfig
        self.verls_module.MixedPrecisionConfig = partial(precision, param_dtype="float32")
        try:
            super()._build_model_optimizer()  # type: ignore[misc]
        finally:
            self.verls_module.MixedPrecisionConfig = precision
