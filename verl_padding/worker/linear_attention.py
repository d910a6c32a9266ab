"""Linear attention of workers' models that keeps packed rows apart, whether they share or not.

verl 0.9 and transformers 5 tell linear layers where rows begin for Qwen3.5's language models with a
vision tower, on GPUs with fla; in Qwen3-Next, in a Qwen3.5 of text alone, in critics and on CPUs, a
row goes on from the row before it. This is needed until all of them do (tests/worker).
"""

from typing import Any

from verl_padding.prefix_sharing.engine import keep_rows_apart
from verl_padding.worker.training_workers import for_training_workers


@for_training_workers
def install_in_worker(role: str, training_worker: Any) -> None:
    """For verl's ``execute_with_func_generator``: for FSDP engines that pack rows.

    Ulysses ranks share rows by fla's own exchange, or see each other, as the probe finds.
    """
    config = training_worker.engine_config
    if (
        config.strategy.startswith("fsdp")
        and config.use_remove_padding
        and config.ulysses_sequence_parallel_size == 1
    ):
        keep_rows_apart(training_worker.engine)
