"""A job with a padding section never trains with one of verl's own trainers, which would silently
ignore the section.

verl chooses a trainer by ``trainer.v1.trainer_mode`` alone and then hands it the config: where it
is made, both are known for the first time, and no worker has started. There, one of verl's trainers
is made as its padded counterpart, so that the config keeps verl's name of the mode. Another one,
such as a user's own that extends one of verl's, refuses.
"""

from typing import Any

from verl_padding.errors import PaddingConfigError
from verl_padding.job.modes import STOCK_MODES


class PaddedTrainerMarker:
    """Marks padded trainers. They are not imported here, since the guard must work even if they
    cannot be."""


PADDED_TRAINERS: dict[type, type] = {}
"""verl's trainers and the padded ones that take their place; filled by
``verl_padding.driver.trainers``."""


def resolve_trainer(trainer: type) -> Any:
    """The trainer that a job with a padding section gets; a PaddingConfigError if it pads
    nothing."""
    chosen = PADDED_TRAINERS.get(trainer, trainer)
    if not issubclass(chosen, PaddedTrainerMarker):
        why = f"{trainer.__name__} is not a padded trainer and would ignore it"
        modes = f"trainer.v1.trainer_mode={', '.join(STOCK_MODES[:-1])} or {STOCK_MODES[-1]}"
        own = (
            "make a trainer of yours extend verl_padding.driver.trainers.PaddedTrainerSync (or one"
            " of its siblings)"
        )
        raise PaddingConfigError(f"padding: {why}. Choose {modes}, {own}, or leave +padding out.")
    return chosen


def pad_or_refuse_in_stock_trainers(base: type) -> None:
    """Changes how trainers that extend ``base`` are made; a config without ``padding`` passes
    through untouched."""

    def make_by_config(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0] if args else {}
        # Python calls the constructor of whatever comes back, which is one of `cls`.
        return object.__new__(cls if config.get("padding") is None else resolve_trainer(cls))

    base.__new__ = staticmethod(make_by_config)  # type: ignore[assignment]
