"""Compares the engines that verl's workers have with those that the plan was made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_padding.errors import PaddingConfigError
from verl_padding.worker.training_workers import for_training_workers

PLANNED = (
    "strategy",
    "use_dynamic_bsz",
    "max_token_len_per_gpu",
    "micro_batch_size_per_gpu",
    "infer_max_token_len_per_gpu",
    "infer_micro_batch_size_per_gpu",
    "use_remove_padding",
    "ulysses_sequence_parallel_size",
    "ulysses_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "dynamic_context_parallel",
    "max_seqlen_per_dp_cp_rank",
    "pad_to_length",
    "pad_to_length_bucket",
)
"""Fields of verl's engine configs that decide what a worker's micro-batches may hold; no backend has all of them."""


def check_engines(planned: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Makes a function for verl's ``execute_with_func_generator`` that checks a worker's engines against the plan's.

    A value that differs would silently make other micro-batches than the plan's.

    Args:
        planned: verl's engine config of each role (``actor``, ``ref``, ``critic``), as the driver has it.
    """

    def check(role: str, trainee: Any) -> None:
        has, wanted = trainee.engine_config, planned.get(role)
        differ = [
            f"{name}={getattr(has, name)!r} (planned: {getattr(wanted, name)!r})"
            for name in PLANNED
            if hasattr(wanted, name) and getattr(has, name) != getattr(wanted, name)
        ]
        if differ:
            raise PaddingConfigError(
                f"the engine of {role} was made with {', '.join(differ)}: that is not what the job's config says. "
                "A worker class or a patch that changes an engine's config must do so where the driver sees it."
            )

    return for_training_workers(check)
