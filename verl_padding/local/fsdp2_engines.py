"""verl's FSDP2 engines on a CPU: registration for device "cpu" and three patches of verl 0.9.

Each function is called once, with the verl module it changes, right after that module's import. A name that
verl no longer has ends the import with an AttributeError: better than training on something else.
"""

from types import ModuleType
from typing import Any

import torch
import wrapt
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_padding.errors import PaddingConfigError


def register_engines(transformer_impl: ModuleType) -> None:
    """Registers verl's FSDP engine classes for device "cpu" (verl registers them for cuda and npu).

    Reference policies ask for ``CPUOffloadPolicy(pin_memory=True)``, and pinning needs an accelerator. Their
    parameters are in CPU memory anyway, so no offload policy is used at all.
    """
    registry = transformer_impl.EngineRegistry
    for model_type, engine in {
        "language_model": transformer_impl.FSDPEngineWithLMHead,
        "value_model": transformer_impl.FSDPEngineWithValueHead,
    }.items():
        on_cpu = type(f"{engine.__name__}OnCpu", (_OnCpu, engine), {})
        registry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(on_cpu)

    def no_offload(wrapped: Any, instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return None

    wrapt.wrap_function_wrapper(transformer_impl, "CPUOffloadPolicy", no_offload)


class _OnCpu:
    """Mixin before one of verl's FSDP engines.

    Raises:
        PaddingConfigError: ranks share rows (Ulysses). verl exchanges their tokens around flash attention alone, which
            has no CPU kernels: each rank would silently attend to its own part of a row.
    """

    engine_config: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        ranks = self.engine_config.ulysses_sequence_parallel_size
        if ranks > 1 and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
            raise PaddingConfigError(
                f"ulysses_sequence_parallel_size={ranks}: attention on a CPU does not support Ulysses. Set it to 1."
            )


def honour_attention_of_value_models(model: ModuleType) -> None:
    """Lets the config choose the attention of a critic.

    ``verl.utils.model.load_valuehead_model`` hard-codes flash_attention_2, which has no CPU kernels.
    """

    def load(wrapped: Any, instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
            from transformers import AutoModelForTokenClassification

            return AutoModelForTokenClassification.from_pretrained(
                local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
            )

        return call(*args, **kwargs)

    wrapt.wrap_function_wrapper(model, "load_valuehead_model", load)


def copy_on_sharded_save(fsdp_utils: ModuleType) -> None:
    """Makes ``fsdp2_sharded_save_to_cpu`` save a copy.

    verl's function relies on ``.cpu()`` to copy, but on a CPU that returns the live parameter itself: separate_async
    would silently restore the policy that it has just trained instead of the old one.
    """

    def save(wrapped: Any, instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shards, global_spec = wrapped(*args, **kwargs)
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, global_spec

    wrapt.wrap_function_wrapper(fsdp_utils, "fsdp2_sharded_save_to_cpu", save)
