"""What is replaced in Megatron-Core where there is no CUDA and no Transformer Engine."""

from __future__ import annotations

import torch
import wrapt
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random as random_states
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from tests.support.engines.megatron.layers import (
    LayersWithoutTransformerEngine,
    PackedAttention,
    RmsNorm,
)
from verl_padding.worker.megatron_engine import FOLLOWED


def replace_transformer_engine():
    """Replaces it in this process, once and for good."""
    if getattr(gpt_layer_specs, "TESpecProvider", None) is LayersWithoutTransformerEngine:
        return
    torch._dynamo.config.disable = (
        True  # small functions are compiled at their first call: minutes on a CPU
    )
    gpt_layer_specs.TESpecProvider = LayersWithoutTransformerEngine
    gpt_layer_specs.TENorm = RmsNorm
    FOLLOWED.add(f"{PackedAttention.__module__}.PackedAttention.forward")
    random_states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random_states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # asked for, and there only with Transformer Engine
    token_dispatcher.maybe_move_tensor_to_cpu = _as_on_the_host
    torch.distributed.all_to_all_single = _with_lists(torch.distributed.all_to_all_single)
    wrapt.wrap_function_wrapper(
        distrib_optimizer, "DistributedOptimizer.sharded_state_dict", _of_a_new_optimizer
    )
    wrapt.wrap_function_wrapper(
        distrib_optimizer, "DistributedOptimizer.load_state_dict", _with_its_steps
    )


def _as_on_the_host(tensor, as_numpy=False, record_stream=False):
    """Megatron-Core's function gives a tensor that is on the CPU back as it is, and not as
    NumPy's."""
    return tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _with_lists(all_to_all):
    """gloo takes sizes as lists of int, nccl whatever counts."""

    def with_lists(
        output,
        input,
        output_split_sizes=None,
        input_split_sizes=None,
        *args,
        **kwargs,
    ):
        sizes = [
            None if of is None else [int(size) for size in of]
            for of in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all(output, input, *sizes, *args, **kwargs)

    return with_lists


def _of_a_new_optimizer(wrapped, instance, args, kwargs):
    """A checkpoint is loaded into an optimizer that has made no step: it takes one of zeros first,
    all of which is then replaced. Megatron-Core does so itself with Transformer Engine's
    optimizer."""

    def call(model_sharded_state_dict, is_loading=False, *rest, **others):
        if is_loading and not instance.optimizer.state:
            instance._init_optimizer_states_with_dummy_values()
        return wrapped(model_sharded_state_dict, is_loading, *rest, **others)

    return call(*args, **kwargs)


def _with_its_steps(wrapped, instance, args, kwargs):
    """In float32 the optimizer's parameters are the model's own, into which a checkpoint is copied.

    torch's optimizer counts its steps once for each weight. Megatron-Core hands it one count for
    all, to which each weight would add, and then copies that of the optimizer of zeros into it; the
    checkpoint's own stands in the groups.
    """
    with torch.no_grad():
        loaded = wrapped(*args, **kwargs)
    for group in instance.optimizer.param_groups:
        for weight in group["params"]:
            instance.optimizer.state[weight]["step"] = torch.tensor(float(group["step"]))
    return loaded
