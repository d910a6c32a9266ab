"""verl's check that its ranks can share the rows of a batch evenly, off for jobs whose batches are
padded.

With fixed micro-batches ``validate_config`` of verl 0.9 wants train_batch_size x n to be a multiple
of what its ranks take at once. Pads always make it one. The check stands in the middle of others,
so verl's function is shown a batch that is changed for this check only.
"""

from copy import deepcopy
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_padding.job.vendor import check_vendor_reaches_workers


def disable_divisibility_check(module: ModuleType) -> None:
    """Wraps ``validate_config`` of verl.utils.config; a job without padding passes through
    untouched, unless it means to have it."""

    def wrapped(validate: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config = kwargs.pop("config") if "config" in kwargs else args[0]
        if config.get("padding") is not None:
            check_vendor_reaches_workers(config)
            config = deepcopy(config)
            rows_per_gpu = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu or 1
            # A multiple of ranks x rows of a micro-batch, by way of the sessions, since verl checks
            # the prompts further.
            config.actor_rollout_ref.rollout.n *= (
                config.trainer.n_gpus_per_node * config.trainer.nnodes * rows_per_gpu
            )
        else:
            from verl_padding.job.misspelt_flag import refuse_misspelt_flag

            refuse_misspelt_flag(config)
        validate(config, *args[1:], **kwargs)

    wrap_function_wrapper(module, "validate_config", wrapped)
