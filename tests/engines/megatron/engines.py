"""verl's Megatron engines for device "cpu". Nothing is changed in a process before it builds one.

Registered when verl imports its Megatron engine, which it does wherever Megatron-Core is installed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tests.engines.megatron.cuda_calls import answer_for_cuda


def register_engines(transformer_impl: ModuleType) -> None:
    """Registers verl's Megatron engine classes for device "cpu" (verl registers them for cuda and npu)."""
    registry = transformer_impl.EngineRegistry
    for model_type, engine in {
        "language_model": transformer_impl.MegatronEngineWithLMHead,
        "value_model": transformer_impl.MegatronEngineWithValueHead,
    }.items():
        on_cpu = type(f"{engine.__name__}OnCpu", (_OnCpu, engine), {})
        registry.register(model_type=model_type, backend="megatron", device="cpu")(on_cpu)


class _OnCpu:
    """Mixin before one of verl's Megatron engines."""

    engine_config: Any
    model_config: Any

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any):
        answer_for_cuda()
        from tests.engines.megatron import megatron_core

        megatron_core.replace_transformer_engine()
        super().__init__(model_config, engine_config, *args, **kwargs)  # type: ignore[call-arg]

    def _build_tf_config(self) -> None:
        # verl's config knows half precisions only, which a CPU emulates: slowly, and hiding small errors.
        object.__setattr__(self.engine_config, "dtype", "float32")
        config = self.model_config.hf_config
        if not hasattr(config, "rope_theta"):  # transformers 5 has it in here, and mbridge asks for it there
            config.rope_theta = config.rope_parameters["rope_theta"]
        super()._build_tf_config()  # type: ignore[misc]
