"""verl's check of a job's config, and what padding adds to it: the flag is spelt well, workers will
be padded, and rows need not be a multiple of what ranks take at once.

With fixed micro-batches ``validate_config`` of verl 0.9 wants train_batch_size x n to be such a
multiple. Pads always make it one. The check stands in the middle of others, so verl's function is
shown a batch that is changed for this check only.
"""

from copy import deepcopy
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_padding.job.vendor import check_vendor_reaches_workers


def wrap_validate_config(module: ModuleType) -> None:
    """Wraps ``validate_config`` of verl.utils.config. A config without padding goes through
    untouched, or is refused for a misspelt flag."""

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
