"""verl's VeOmni engines for device "cpu". Nothing is changed in a process before it builds one."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from verl_padding.on_cpu.verl_patches import register_on_cpu


def register_engines(transformer_impl: ModuleType) -> None:
    register_on_cpu(transformer_impl, "VeOmniEngine", "veomni", _OnCpu)


class _OnCpu:
    """Mixin before one of verl's VeOmni engines."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._autocast_dtype = torch.float32  # verl's word for no autocast

    def _build_model_optimizer(self) -> None:
        # verl takes VeOmni's own dtype for what is computed, bfloat16, which a CPU emulates:
        # slowly, and hiding small errors. It has no setting for it.
        from verl.workers.engine.veomni import transformer_impl

        in_float32 = partial(transformer_impl.MixedPrecisionConfig, param_dtype="float32")
        with mock.patch.object(transformer_impl, "MixedPrecisionConfig", in_float32):
            super()._build_model_optimizer()  # type: ignore[misc]
