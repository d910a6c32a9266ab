"""How long a pad has to be: what the engines of a job make of a row's length."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from omegaconf import DictConfig

from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.errors import PaddingConfigError

FP8_ROW_MULTIPLE = 16


def row_multiple(role: DictConfig) -> int:
    """What the engine of a role rounds the length of every row up to (verl 0.9, models/mcore/util.py).

    Megatron: the tensor-parallel size, times twice the context-parallel size if that is more than one; with FP8, the
    least common multiple with 16. FSDP, FSDP2 and VeOmni pack rows and round the whole micro-batch up (Ulysses,
    utils/ulysses.py): 1.
    """
    if role.strategy != "megatron":
        return 1
    megatron = role.megatron
    context = int(megatron.context_parallel_size)
    multiple = int(megatron.tensor_model_parallel_size) * (2 * context if context > 1 else 1)
    return lcm(FP8_ROW_MULTIPLE, multiple) if _rows_are_fp8(role) else multiple


def why_row_multiple(role: DictConfig) -> str:
    """What :func:`row_multiple` is made of, in words: ``tensor 2 x twice context 2``; empty if it is 1."""
    if role.strategy != "megatron":
        return ""
    tensor, context = (int(role.megatron[f"{name}_parallel_size"]) for name in ("tensor_model", "context"))
    parts = [f"tensor {tensor}"] if tensor > 1 else []
    parts += [f"twice context {context}"] if context > 1 else []
    told = " x ".join(parts)
    if _rows_are_fp8(role):
        return f"{told}, and {FP8_ROW_MULTIPLE} for FP8" if told else f"{FP8_ROW_MULTIPLE} for FP8"
    return told


def _rows_are_fp8(role: DictConfig) -> bool:
    return (role.megatron.get("override_transformer_config") or {}).get("fp8") in ("e4m3", "hybrid")


def pad_length(padding: PaddingConfig, roles: Iterable[DictConfig], at_least: int = MIN_PAD_LENGTH) -> int:
    """Tokens of a pad.

    ``auto`` is the shortest length that no engine rounds up: a shorter pad would cost the same and count as less. An
    explicit length is checked by the same rule.

    Args:
        roles: the sections of actor, reference and critic, as far as the job has them.
        at_least: tokens that a pad needs for what it shows the model.

    Raises:
        PaddingConfigError: an explicit length is too short, or an engine would round it up.
    """
    multiple = lcm(*(row_multiple(role) for role in roles))
    shortest = -(-max(at_least, MIN_PAD_LENGTH) // multiple) * multiple
    if padding.pad_length == "auto":
        return shortest
    length = int(padding.pad_length)
    if length < shortest or length % multiple:
        fitting = -(-max(length, shortest) // multiple) * multiple
        raise PaddingConfigError(
            f"padding.pad_length={length}: the job's engines take rows in multiples of {multiple} tokens, and a pad "
            f"has at least {shortest}. Set padding.pad_length=auto, or {fitting}."
        )
    return length
