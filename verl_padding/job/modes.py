"""Names of verl's trainer modes, and of the padded ones that extend them. Importing this costs
nothing."""

from verl_padding.errors import PaddingConfigError

MODE_PREFIX = "padded_"
STOCK_MODES = SYNC, COLOCATE_ASYNC, SEPARATE_ASYNC = "sync", "colocate_async", "separate_async"
"""Trainer modes of verl 0.9 that have a padded counterpart, which answers to ``padded_<mode>`` as
well."""


def stock_mode(trainer_mode: str) -> str:
    """verl's own name of a mode, with or without our prefix: ``padded_sync`` -> ``sync``."""
    mode = trainer_mode.removeprefix(MODE_PREFIX)
    if mode not in STOCK_MODES:
        raise PaddingConfigError(
            f"trainer.v1.trainer_mode={trainer_mode!r}: not a trainer that can be padded. "
            f"Choices: {', '.join(STOCK_MODES)}, or the name of a registered trainer that extends "
            "one of the padded ones."
        )
    return mode
