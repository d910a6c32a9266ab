"""verl's Megatron engines for device "cpu", and what Megatron-Core asks of ``torch.cuda``, answered
by the CPU. With VERL_ENGINE_DEVICE=cpu, a GPU computes the same layers.

verl imports its Megatron engine wherever Megatron-Core is installed, so nothing is changed in a
process before it builds one. Megatron-Core places its buffers, its random states and its streams on
a CUDA device without asking for one. Each answer below says "the CPU" to such a question; none
computes anything.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext

import torch
from torch import nn
from verl.utils.device import get_device_name

from verl_padding.on_cpu.verl_patches import register_on_cpu

CPU = torch.device("cpu")
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn")
"""Functions of torch that Megatron-Core calls with a CUDA device."""


def register_engines(transformer_impl):
    register_on_cpu(transformer_impl, "MegatronEngine", "megatron", _OnCpu)


class _OnCpu:
    """Mixin before one of verl's Megatron engines."""

    def __init__(self, model_config, engine_config, *args, **kwargs):
        if get_device_name() == "cpu":
            answer_for_cuda()
        from tests.support.engines.megatron import megatron_core

        megatron_core.replace_transformer_engine()
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_tf_config(self):
        # verl's config knows half precisions only, which a CPU emulates: slowly, and hiding small
        # errors.
        if os.environ.get("DTYPE") != "bfloat16":
            object.__setattr__(self.engine_config, "dtype", "float32")
        config = self.model_config.hf_config
        if not hasattr(
            config, "rope_theta"
        ):  # transformers 5 has it in here, and mbridge asks for it there
            config.rope_theta = config.rope_parameters["rope_theta"]
        super()._build_tf_config()


class NoStream:
    """A stream or an event of a device that runs everything in order: whatever it is told is done
    already."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return NoStream


def answer_for_cuda():
    """Changes ``torch.cuda`` and what leads there, in this process, once and for good."""
    if isinstance(torch.cuda.Stream, type) and issubclass(torch.cuda.Stream, NoStream):
        return
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = cuda.reset_peak_memory_stats = _nothing
    cuda.Stream = cuda.Event = NoStream
    cuda.current_stream = cuda.default_stream = NoStream
    cuda.stream = lambda *_, **__: nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.type = _with_types_of_cuda(torch.Tensor.type)


def _nothing(*_, **__):
    pass


def _on_cpu(factory):
    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return on_cpu


def _with_types_of_cuda(type_of):
    """Megatron-Core's optimizers know parameters by names such as ``torch.cuda.FloatTensor``."""

    def with_cuda(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return str(type_of(self)).replace("torch.", "torch.cuda.")
        return type_of(self, dtype, *args, **kwargs)

    return with_cuda
