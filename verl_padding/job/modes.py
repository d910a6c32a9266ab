"""Names of verl's trainer modes that have a padded counterpart. Importing this costs nothing."""

from verl_padding.errors import PaddingConfigError

MODES = SYNC, COLOCATE_ASYNC, SEPARATE_ASYNC = "sync", "colocate_async", "separate_async"
MODE = "trainer.v1.trainer_mode"


def check_mode(mode: str) -> str:
    """The mode; a PaddingConfigError if it has no padded counterpart."""
    if mode not in MODES:
        raise PaddingConfigError(
            f"{MODE}={mode!r}: not a trainer that can be padded. Choices: {', '.join(MODES)}, or a "
            "registered trainer that extends a padded one."
        )
    return mode
