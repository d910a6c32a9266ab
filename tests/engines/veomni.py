"""verl's VeOmni engines for device "cpu". Nothing is changed in a process before it builds one."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch


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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._autocast_dtype = torch.float32  # verl's word for no autocast

    def _build_model_optimizer(self) -> None:
        # verl takes VeOmni's own dtype for what is computed, bfloat16, which a CPU emulates: slowly, and hiding small
        # errors. It has no setting for it.
        precision = self.verls_module.MixedPrecisionConfig
        self.verls_module.MixedPrecisionConfig = partial(precision, param_dtype="float32")
        try:
            super()._build_model_optimizer()  # type: ignore[misc]
        finally:
            self.verls_module.MixedPrecisionConfig = precision
