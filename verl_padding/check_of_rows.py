"""verl's check that its ranks can share the rows of a batch evenly, lifted for jobs whose batches are padded.

With fixed micro-batches ``validate_config`` of verl 0.9 wants train_batch_size x n to be a multiple of what its ranks
take at once. Pads make it one, whatever comes. The check stands in the middle of others, so verl's function is shown a
batch that passes this one alone.
"""

from __future__ import annotations

from copy import deepcopy
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf
from wrapt import wrap_function_wrapper

KNOWN_VERL = "0.9."
"""Versions of verl whose check is known."""
VERLS_OWN = ("sync", "colocate_async", "separate_async")
"""Trainers that verl registers, by name."""


def lift_check_of_rows(module: ModuleType) -> None:
    """Wraps ``validate_config`` of verl.utils.config; what does not ask for padding passes through untouched."""
    wrap_function_wrapper(module, "validate_config", _validate)


def _validate(validate: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import verl  # here: the module is wrapped while verl is being imported, and does not know its version yet

    config = kwargs.pop("config") if "config" in kwargs else args[0]
    if verl.__version__.startswith(KNOWN_VERL):
        config = _with_rows_for_all(config)
    validate(config, *args[1:], **kwargs)


def _with_rows_for_all(config: Any) -> Any:
    if not _is_padded(config):
        return config
    actor = config.actor_rollout_ref.actor
    view = deepcopy(config)
    # A multiple of ranks x rows of a micro-batch: of the sessions of a prompt, since verl asks more of the prompts.
    view.actor_rollout_ref.rollout.n *= (
        config.trainer.n_gpus_per_node * config.trainer.nnodes * (actor.ppo_micro_batch_size_per_gpu or 1)
    )
    return view


def _is_padded(config: Any) -> bool:
    if config.get("padding") is not None:
        return True
    if OmegaConf.select(config, "trainer.v1.trainer_mode") in (None, *VERLS_OWN):
        return False  # nothing of ours is imported for these
    from verl_padding.trainer.trainers import asks_for_padding

    return asks_for_padding(config)
